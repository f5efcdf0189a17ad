package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/mesh/dev"
	"github.com/gpuaas/mesh/mesh/halt"
)

func newDevCommand() *cobra.Command {
	var cfg dev.Config
	var level, contextName string
	cmd := &cobra.Command{
		Use: "dev", Short: "Run a whole mesh on this machine, real agents and a demo workspace included", Args: noArgs,
		GroupID: groupMesh,
		Long: "dev runs the four services in one process, over the same mutual TLS as anywhere, with Postgres, Redis and " +
			"real node agents beside it.\n" +
			"It writes a context named `dev` and makes it current, so that every other command finds this mesh. While " +
			"another mesh runs under\n" +
			"that name the context is `dev-2`. It makes a person of each role too, each with a context: dev-viewer, " +
			"dev-tenant (of the demo\n" +
			"tenant), dev-operator, dev-security. Data is kept between runs.\n" +
			"Ctrl-C ends everything that it started, workloads included. Another one more than five seconds later kills " +
			"it all.\n" +
			"With --ephemeral the directory and the context are removed either way, and by the next start if the mesh was " +
			"killed itself;\n" +
			"the context that was current before is current again.",
		Example: "  gpuaas dev\n  gpuaas dev --ephemeral --nodes 1\n  gpuaas dev --policy policy.yaml --no-demo",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDev(cmd, cfg, level, contextName)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.DataDir, "data-dir", "",
		"directory of data and identities (default $XDG_DATA_HOME/gpuaas/dev; as root /var/lib/gpuaas/dev)")
	f.BoolVar(&cfg.Ephemeral, "ephemeral", false, "use a directory that is removed at the end, and free ports")
	f.IntVar(&cfg.Nodes, "nodes", 3, "how many node agents to run")
	f.StringVar(&cfg.PolicyFile, "policy", "", "file of policy keys to set, YAML")
	f.StringVar(&cfg.DatabaseURL, "database-url", "",
		"use the Postgres at this URL, as an administrator, instead of one of our own")
	f.StringVar(&cfg.RedisURL, "redis-url", "",
		"use the Redis at this URL instead of a redis-server of our own; `embedded`: an imitation in this process, as "+
			"without redis-server")
	f.StringVar(&cfg.ConsoleAddr, "console-addr", "",
		"where people and their clients connect (default "+dev.DefaultConsoleAddr+")")
	f.StringVar(&cfg.NodeAddr, "node-addr", "", "where agents connect (default "+dev.DefaultNodeAddr+")")
	f.StringVar(&cfg.EnrollAddr, "enroll-addr", "", "where machines enrol (default "+dev.DefaultEnrollAddr+")")
	f.StringVar(&cfg.MetricsAddr, "metrics-addr", "",
		"where metrics and health are served (default "+dev.DefaultMetricsAddr+")")
	f.BoolVar(&cfg.NoDemo, "no-demo", false, "make no demo tenant and workspace")
	f.StringVar(&cfg.AgentBinary, "agent-binary", "", "the node agent's program (default: beside this one, else on PATH)")
	f.StringVar(&level, "log-level", "warn",
		"least level of the log on stderr; everything from info on goes to dev.log in the data directory")
	f.StringVar(&contextName, "context-name", "dev",
		"name of the context that is written and made current, with -2, -3 … if another mesh that runs has it; empty: none")
	return cmd
}

func runDev(cmd *cobra.Command, cfg dev.Config, level, contextName string) error {
	began := time.Now()
	dir := cfg.DataDir
	if dir == "" && !cfg.Ephemeral {
		var err error
		if dir, err = dev.DefaultDataDir(); err != nil {
			return err
		}
	}
	log := &devLog{}
	defer log.close()
	logger, err := log.logger(cmd.ErrOrStderr(), level)
	if err != nil {
		return exit.Usage(err)
	}
	held, err := absolute(dir)
	if err != nil {
		return err
	}
	ctx, release := app.WithSignals(cmd.Context(), logger, halt.Force(held),
		func(context.Context) error { return forget() })
	defer release()
	version, _ := obs.Build()
	m, err := dev.New(ctx, dev.Deps{
		Logger: logger, Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr(), Announce: announce(cmd.ErrOrStderr(), contextName),
		Opened: func(dir string) error {
			forgetDead(logger)
			return log.open(dir)
		},
		Began: began, Version: version,
	}, cfg)
	if err != nil {
		return refusal(err)
	}
	err = m.Run(ctx)
	stopped := "data stays in " + m.Dir()
	if cfg.Ephemeral {
		stopped = "nothing stays"
		err = errors.Join(err, forget(m.Dir()))
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "stopped; %s\n", stopped)
	return err
}

// absolute returns filepath.Abs of a path; empty for an empty path.
func absolute(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("find data directory: %w", err)
	}
	return abs, nil
}

// refusal returns the error that keeps a mesh from starting, with each problem on a line of its own.
func refusal(err error) error {
	var config *dev.ConfigError
	var taken *dev.AddressError
	switch {
	case errors.As(err, &config):
		return listed(commonv1.Reason_REASON_INVALID_ARGUMENT, "the mesh cannot start as asked", config.Problems,
			"correct the named flags")
	case errors.As(err, &taken):
		return listed(commonv1.Reason_REASON_PRECONDITION_FAILED, "an address of the mesh cannot be had", taken.Problems,
			"choose other addresses, or --ephemeral")
	case errors.Is(err, dev.ErrInUse):
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, err.Error(),
			fault.Remedy("end it, or choose another directory with --data-dir"), fault.Cause(err))
	default:
		return err
	}
}

// listed returns one refusal for several problems.
func listed(reason commonv1.Reason, public string, problems []error, remedy string) error {
	if len(problems) == 1 {
		return fault.New(reason, problems[0].Error(), fault.Remedy(remedy), fault.Cause(problems[0]))
	}
	lines := kit.TextsOf(problems, error.Error)
	return fault.New(reason, public, fault.Unmet(lines...), fault.Remedy(remedy), fault.Cause(errors.Join(problems...)))
}

// announce returns the function that writes the client's context of a mesh and makes it current, or nil if base is
// empty.
func announce(notes io.Writer, base string) func(context.Context, dev.Announcement) (string, error) {
	if base == "" {
		return nil
	}
	return func(ctx context.Context, a dev.Announcement) (string, error) {
		path, err := contexts.DefaultPath()
		if err != nil {
			return "", err
		}
		own := contexts.Context{
			Server: a.Server, TrustDomain: a.TrustDomain, CAPEM: a.CAPEM, Token: a.Token, Mesh: a.Dir, Ephemeral: a.Ephemeral,
		}
		got, err := contexts.Announce(ctx, path, base, own)
		if err != nil {
			return "", err
		}
		name := got.Name
		noteContext(notes, got, base, "this mesh")
		for _, p := range a.People {
			own.Token = p.Token
			want := dev.PersonContext(name, p.Role)
			got, err := contexts.Share(ctx, path, want, own)
			if err != nil {
				return "", err
			}
			noteContext(notes, got, want, "the "+p.Role+" of this mesh")
		}
		return name, nil
	}
}

// noteContext prints which context belongs to whose if its name differs from the requested one, and whether the
// requested one belongs to another mesh or a person.
func noteContext(notes io.Writer, got contexts.Announced, want, whose string) {
	switch {
	case got.Taken:
		fmt.Fprintf(notes, "the context %q is in use by another mesh, or is a person's own; that of %s is %q\n", want, whose,
			got.Name)
	case got.Name != want:
		fmt.Fprintf(notes, "%s keeps its context %q; %q is free\n", whose, got.Name, want)
	}
}

// forget removes the contexts of the meshes in these directories, and of ephemeral meshes whose directories are gone,
// those of their further persons included.
func forget(dirs ...string) error {
	path, err := contexts.DefaultPath()
	if err != nil {
		return err
	}
	errs := []error{contexts.RemoveDead(path)}
	for _, dir := range dirs {
		errs = append(errs, contexts.RemoveMesh(path, dir))
	}
	return errors.Join(errs...)
}

// forgetDead calls forget and logs a failure, for callers whose main work is another.
func forgetDead(logger *slog.Logger) {
	if err := forget(); err != nil {
		// it belongs to no request
		logger.Warn("the contexts of meshes that have ended were not removed", obs.Err(err))
	}
}

// devLog is the log of a mesh: warnings on the terminal, and everything from info on in a file of the data directory,
// whose path is known only after the first record.
type devLog struct {
	mu      sync.Mutex
	file    *os.File
	waiting bytes.Buffer // of the records before the file is open
	closed  bool
}

// logger returns a logger that writes to both.
func (l *devLog) logger(terminal io.Writer, level string) (*slog.Logger, error) {
	shown, err := terminalLogger(terminal, level)
	if err != nil {
		return nil, err
	}
	kept, err := obs.NewLogger(l, obs.LogConfig{})
	if err != nil {
		return nil, err
	}
	return slog.New(slog.NewMultiHandler(shown.Handler(), kept.Handler())), nil
}

// terminalLogger returns a logger that writes to the terminal alone.
func terminalLogger(terminal io.Writer, level string) (*slog.Logger, error) {
	file, isFile := terminal.(*os.File)
	return obs.NewLogger(terminal, obs.LogConfig{Level: level, Format: "text", Color: isFile && output.Colors(file)})
}

// Write implements io.Writer.
func (l *devLog) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
		return len(p), nil
	case l.file == nil:
		return l.waiting.Write(p)
	}
	return l.file.Write(p)
}

// open opens the file in an existing directory, and writes the records that were logged before.
func (l *devLog) open(dir string) error {
	path := filepath.Join(dir, dev.LogFile)
	const enough = 64 << 20
	if info, err := os.Stat(path); err == nil && info.Size() > enough {
		if err := os.Rename(path, path+".old"); err != nil {
			return fmt.Errorf("rotate log: %w", err)
		}
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.file = file
	if _, err := l.waiting.WriteTo(file); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}

func (l *devLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.file != nil {
		_ = l.file.Close()
	}
}
