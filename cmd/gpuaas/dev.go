package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
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
		Use: "dev", Short: "Run a whole mesh on this machine, real agents and a demo workspace included", Args: noArgs, GroupID: groupMesh,
		Long: "dev runs the four services in one process, over the same mutual TLS as anywhere, with Postgres, Redis and real node agents beside it.\n" +
			"It writes a context named `dev` and makes it current, so that every other command finds this mesh. Data is kept between runs.\n" +
			"Ctrl-C ends everything that it started, workloads included. Another one more than five seconds later kills it all.\n" +
			"With --ephemeral the directory is removed either way, and by the next start if the mesh was killed itself.",
		Example: "  gpuaas dev\n  gpuaas dev --ephemeral --nodes 1\n  gpuaas dev --policy policy.yaml --no-demo",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDev(cmd, cfg, level, contextName)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.DataDir, "data-dir", "", "directory of data and identities (default $XDG_DATA_HOME/gpuaas/dev; as root /var/lib/gpuaas/dev)")
	f.BoolVar(&cfg.Ephemeral, "ephemeral", false, "use a directory that is removed at the end, and free ports")
	f.IntVar(&cfg.Nodes, "nodes", 3, "how many node agents to run")
	f.StringVar(&cfg.PolicyFile, "policy", "", "file of policy keys to set, YAML")
	f.StringVar(&cfg.DatabaseURL, "database-url", "", "use the Postgres at this URL, as an administrator, instead of one of our own")
	f.StringVar(&cfg.RedisURL, "redis-url", "", "use the Redis at this URL instead of one of our own")
	f.StringVar(&cfg.ConsoleAddr, "console-addr", "", "where people and their clients connect (default "+dev.DefaultConsoleAddr+")")
	f.StringVar(&cfg.NodeAddr, "node-addr", "", "where agents connect (default "+dev.DefaultNodeAddr+")")
	f.StringVar(&cfg.EnrollAddr, "enroll-addr", "", "where machines enrol (default "+dev.DefaultEnrollAddr+")")
	f.StringVar(&cfg.MetricsAddr, "metrics-addr", "", "where metrics and health are served (default "+dev.DefaultMetricsAddr+")")
	f.BoolVar(&cfg.NoDemo, "no-demo", false, "make no demo tenant and workspace")
	f.StringVar(&cfg.AgentBinary, "agent-binary", "", "the node agent's program (default: beside this one, else on PATH)")
	f.StringVar(&level, "log-level", "warn", "least level of the log on stderr; everything from info on goes to dev.log in the data directory")
	f.StringVar(&contextName, "context-name", "dev", "name of the context that is written; empty: none")
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
	logger, closeLog, err := devLogger(cmd.ErrOrStderr(), level, dir)
	if err != nil {
		return err
	}
	defer closeLog()
	held, err := absolute(dir)
	if err != nil {
		return err
	}
	ctx, release := app.WithSignals(cmd.Context(), logger, halt.Force(held))
	defer release()
	version, _ := obs.Build()
	m, err := dev.New(ctx, dev.Deps{
		Logger: logger, Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr(), Announce: announce(contextName), Began: began, Version: version,
	}, cfg)
	if err != nil {
		return refusal(err)
	}
	err = m.Run(ctx)
	stopped := "data stays in " + m.Dir()
	if cfg.Ephemeral {
		stopped = "nothing stays"
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "stopped; %s\n", stopped)
	return err
}

// absolute is filepath.Abs of a path that may be empty.
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

// refusal spells what keeps a mesh from starting, every problem on a line of its own.
func refusal(err error) error {
	var config *dev.ConfigError
	var taken *dev.AddressError
	switch {
	case errors.As(err, &config):
		return listed(commonv1.Reason_REASON_INVALID_ARGUMENT, "the mesh cannot start as asked", config.Problems, "correct the named flags")
	case errors.As(err, &taken):
		return listed(commonv1.Reason_REASON_PRECONDITION_FAILED, "an address of the mesh cannot be had", taken.Problems, "choose other addresses, or --ephemeral")
	case errors.Is(err, dev.ErrInUse):
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, err.Error(), fault.Remedy("end it, or choose another directory with --data-dir"), fault.Cause(err))
	default:
		return err
	}
}

// listed makes one refusal of many problems.
func listed(reason commonv1.Reason, public string, problems []error, remedy string) error {
	if len(problems) == 1 {
		return fault.New(reason, problems[0].Error(), fault.Remedy(remedy), fault.Cause(problems[0]))
	}
	lines := make([]string, 0, len(problems))
	for _, p := range problems {
		lines = append(lines, p.Error())
	}
	return fault.New(reason, public, fault.Unmet(lines...), fault.Remedy(remedy), fault.Cause(errors.Join(problems...)))
}

// announce writes the client's context.
func announce(name string) func(dev.Announcement) error {
	if name == "" {
		return nil
	}
	return func(a dev.Announcement) error {
		path, err := contexts.DefaultPath()
		if err != nil {
			return err
		}
		return contexts.Put(path, contexts.Context{Name: name, Server: a.Server, TrustDomain: a.TrustDomain, CAPEM: a.CAPEM, Token: a.Token}, true)
	}
}

// devLogger writes warnings to the terminal, and everything to a file of the data directory.
func devLogger(terminal io.Writer, level, dir string) (*slog.Logger, func(), error) {
	file, isFile := terminal.(*os.File)
	shown, err := obs.NewLogger(terminal, obs.LogConfig{Level: level, Format: "text", Color: isFile && isTerminal(file)})
	if err != nil {
		return nil, nil, err
	}
	if dir == "" {
		return shown, func() {}, nil
	}
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, nil, fmt.Errorf("make data directory: %w", err)
	}
	path := filepath.Join(dir, "dev.log")
	const enough = 64 << 20
	if info, err := os.Stat(path); err == nil && info.Size() > enough {
		if err := os.Rename(path, path+".old"); err != nil {
			return nil, nil, fmt.Errorf("rotate log: %w", err)
		}
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("open log: %w", err)
	}
	kept, err := obs.NewLogger(out, obs.LogConfig{})
	if err != nil {
		return nil, nil, err
	}
	logger := slog.New(slog.NewMultiHandler(shown.Handler(), kept.Handler()))
	return logger, func() { _ = out.Close() }, nil
}
