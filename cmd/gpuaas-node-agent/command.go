package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/agent/diag/journald"
	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/identity/envfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
)

// Exit codes.
const (
	exitOK         = 0
	exitError      = 1
	exitUsage      = 2
	exitNotAllowed = 4
	exitReplaced   = 5
)

// usageError is the error of a mistake in the command line or the configuration.
type usageError struct{ cause error }

func (e *usageError) Error() string { return e.cause.Error() }
func (e *usageError) Unwrap() error { return e.cause }

// program has the settings and streams that the subcommands share.
type program struct {
	cfg    agent.Config
	format string
	level  string
	out    io.Writer
	errOut io.Writer

	moveLedger bool
}

// execute runs the command line and returns the exit code.
func execute(ctx context.Context, args []string, out, errOut io.Writer) int {
	p := &program{cfg: agent.Default(), out: out, errOut: errOut}
	p.cfg.Version, _ = obs.Build()
	p.cfg.WorkDir = ""
	p.cfg.JournalSocket = journald.Socket
	root := p.command() //nolint:contextcheck // each command takes its context from ExecuteContext below
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errOut)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	_, _ = fmt.Fprintln(errOut, "gpuaas-node-agent:", err)
	if remedy := remedyOf(err); remedy != "" {
		_, _ = fmt.Fprintln(errOut, "  hint:", remedy)
	}
	return codeOf(err)
}

// remedyOf returns what a person does about a refusal; empty if err is none.
func remedyOf(err error) string {
	refusal, ok := fault.As(err)
	if ended, timed := errors.AsType[*enrol.EndedError](err); !ok && timed {
		refusal, ok = fault.As(ended.Last)
	}
	if !ok {
		return ""
	}
	return cmp.Or(refusal.Remedy, fault.RowOf(refusal.Reason).Remedy)
}

func codeOf(err error) int {
	var (
		usage  *usageError
		config *agent.ConfigError
		env    *envfile.Error
		locked *identity.LockedError
	)
	switch {
	case errors.Is(err, agent.ErrReplaced):
		return exitReplaced
	case errors.As(err, &locked), fault.Has(err, commonv1.Reason_REASON_BUNDLE_INVALID):
		return exitNotAllowed
	case errors.As(err, &usage), errors.As(err, &config), errors.As(err, &env):
		return exitUsage
	default:
		return exitError
	}
}

func (p *program) command() *cobra.Command {
	root := &cobra.Command{
		Use: "gpuaas-node-agent", Short: "The agent of a GPU machine",
		SilenceErrors: true, SilenceUsage: true, Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			return &usageError{errors.New("name a command: run, enroll, diag or version")}
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&p.cfg.EtcDir, "etc-dir", agent.DefaultEtcDir, "directory of node-agent.env, certificates and trust")
	flags.StringVar(&p.cfg.StateDir, "state-dir", agent.DefaultStateDir,
		"directory of identity, task ledger and diagnostics")
	flags.StringVar(&p.format, "log-format", "json", "format of the log on stderr: json or text")
	flags.StringVar(&p.level, "log-level", "info", "least level of the log: debug, info, warn or error")
	root.AddCommand(p.run(), p.enrol(), p.diagnostics(), p.version())
	return root
}

func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

func (p *program) hostFlags(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&p.cfg.WorkDir, "work-dir", "",
		"directory of what workspaces see; all above it must be open to traversal (default: workspaces, in the state "+
			"directory)")
	flags.StringVar(&p.cfg.UIDDir, "uid-dir", agent.DefaultUIDDir,
		"directory of the uids of workspaces, shared by all agents of a host")
	flags.IntVar(&p.cfg.SimulatedGPUs, "gpus", 0, "declare this many simulated GPUs instead of looking for real ones")
	flags.BoolVar(&p.moveLedger, "move-corrupt-ledger", true,
		"set a task ledger that cannot be read aside and begin a new one; false: end with an error")
}

// absolute makes the paths absolute: a person may give directories relative to the working directory, and the agent
// must find them again after any restart.
func absolute(paths ...*string) error {
	var problems []error
	for _, path := range paths {
		if *path == "" {
			continue
		}
		full, err := filepath.Abs(*path)
		if err != nil {
			problems = append(problems, fmt.Errorf("directory %s: %w", *path, err))
			continue
		}
		*path = full
	}
	return errors.Join(problems...)
}

// open returns an agent and its logger. Its error joins all problems of flags, files and log settings.
func (p *program) open(ctx context.Context) (*agent.Agent, *slog.Logger, error) {
	if err := absolute(&p.cfg.EtcDir, &p.cfg.StateDir, &p.cfg.WorkDir, &p.cfg.UIDDir); err != nil {
		return nil, nil, &usageError{err}
	}
	p.cfg.KeepCorruptLedger = !p.moveLedger
	logger, err := obs.NewLogger(p.errOut, obs.LogConfig{Format: p.format, Level: p.level})
	if err != nil {
		cfg := p.cfg
		if cfg.WorkDir == "" {
			cfg.WorkDir = cfg.StateDir
		}
		return nil, nil, &usageError{errors.Join(err, cfg.Validate())}
	}
	a, err := agent.New(ctx, agent.Deps{Logger: logger}, p.cfg)
	return a, logger, err
}

func (p *program) run() *cobra.Command {
	cmd := &cobra.Command{
		Use: "run", Short: "Work for the control plane until told to end; enrol first where a token is held", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, logger, err := p.open(cmd.Context())
			if err != nil {
				return err
			}
			ctx, release := app.WithSignals(cmd.Context(), logger)
			defer release()
			logger.LogAttrs(ctx, slog.LevelInfo, "agent started", slog.String("version", p.cfg.Version),
				slog.String("ops", a.OpsAddr()))
			return a.Run(ctx)
		},
	}
	p.hostFlags(cmd)
	cmd.Flags().DurationVar(&p.cfg.RoomEvery, "room-every", p.cfg.RoomEvery,
		"time between two checks for room on the disks of the agent's directories")
	cmd.Flags().DurationVar(&p.cfg.FactsEvery, "facts-every", p.cfg.FactsEvery,
		"time between two scans of the host for its facts")
	cmd.Flags().StringVar(&p.cfg.OpsListen, "ops-listen", "", "loopback host:port for metrics and health (default none)")
	return cmd
}

func (p *program) enrol() *cobra.Command {
	var bundle agent.Bundle
	var timeout time.Duration
	var restore bool
	cmd := &cobra.Command{
		Use: "enroll", Short: "Make this host a node with an operator's bundle, and exit when a certificate is held",
		Long: "Make this host a node with an operator's bundle, and exit when a certificate is held. The bundle is the\n" +
			"directory of `gpuaas nodes enroll` for a new machine, or the signed archive of `gpuaas nodes bundle` for a\n" +
			"node that exists. It is taken as a whole or not at all: an archive only if its signature is by a key that\n" +
			"this host trusts, or with the digest that was printed when it was issued, and only after its endpoints were\n" +
			"verified with the trust that it brings. What it replaces is kept, and is put back if the control plane\n" +
			"refuses this node for good, or by --restore. The agent of this host must not run meanwhile.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, logger, err := p.open(cmd.Context())
			if err != nil {
				return err
			}
			ctx, release := app.WithSignals(cmd.Context(), logger)
			defer release()
			if timeout > 0 {
				limited, cancel := context.WithTimeout(ctx, timeout)
				defer cancel()
				ctx = limited
			}
			if restore {
				api, err := a.RestoreFormer(ctx)
				if err := errors.Join(err, a.Close()); err != nil {
					return err
				}
				_, err = fmt.Fprintln(p.out, "endpoints and trust from before the last bundle are back; the node API is "+api)
				return err
			}
			err = errors.Join(a.Enrol(ctx, bundle), a.Close())
			if timeout > 0 && errors.Is(err, context.DeadlineExceeded) {
				return fmt.Errorf("not enrolled within %s: %w", timeout, err)
			}
			if errors.Is(err, enrol.ErrNoToken) {
				return &usageError{errors.New("no token is held: name a bundle with --bundle PATH")}
			}
			if err != nil {
				return err
			}
			node, _ := a.Node()
			_, err = fmt.Fprintln(p.out, node.NodeID)
			return err
		},
	}
	p.hostFlags(cmd)
	cmd.Flags().StringVar(&bundle.Path, "bundle", "",
		"`path` of the directory of 'gpuaas nodes enroll', or of the archive of 'gpuaas nodes bundle'")
	cmd.Flags().StringVar(&bundle.Digest, "digest", "",
		"digest of the archive as it was printed, where this host does not trust the key that signed it")
	cmd.Flags().BoolVar(&restore, "restore", false,
		"put back the endpoints and the trust from before the last bundle, and do nothing else")
	cmd.MarkFlagsMutuallyExclusive("bundle", "restore")
	cmd.Flags().DurationVar(&timeout, "timeout", 0,
		"give up after this long; the next try goes on with the same key (default never)")
	return cmd
}

func (p *program) diagnostics() *cobra.Command {
	format := ""
	cmd := &cobra.Command{
		Use: "diag", Short: "Print what this host recorded while the control plane could not be reached", Args: noArgs,
		Long: "Print what this host recorded while the control plane could not be reached. An operator's\n" +
			"`gpuaas nodes diag NODE --file FILE` brings it to the control plane.",
		RunE: func(*cobra.Command, []string) error {
			if format != "json" {
				return &usageError{fmt.Errorf("the only format is json, not %q", format)}
			}
			if _, err := os.Stat(p.cfg.StateDir); err != nil {
				return &usageError{fmt.Errorf("--state-dir: %w", err)}
			}
			entries, err := agent.Diagnostics(p.cfg.StateDir, time.Now())
			if err != nil {
				return err
			}
			items := make([]diagnostic, 0, len(entries))
			for _, e := range entries {
				items = append(items, diagnostic{
					e.Code, e.Detail, e.FirstSeen, e.LastSeen, e.Count, e.NextRetry.Seconds(),
					e.EndedAt, e.RetryCorrelationID, e.DedupeKeyHash,
				})
			}
			encoder := json.NewEncoder(p.out)
			encoder.SetIndent("", "  ")
			return encoder.Encode(map[string]any{"items": items})
		},
	}
	cmd.Flags().StringVarP(&format, "output", "o", "json", "json, the only format")
	return cmd
}

type diagnostic struct {
	Code             string    `json:"code"`
	Detail           string    `json:"detail"`
	FirstSeen        time.Time `json:"first_seen"`
	LastSeen         time.Time `json:"last_seen"`
	Count            int64     `json:"count"`
	NextRetrySeconds float64   `json:"next_retry_seconds"`
	EndedAt          time.Time `json:"ended_at,omitzero"` // once it has ended
	// RetryCorrelationID is that of the attempts that failed in a row; empty where nothing was attempted.
	RetryCorrelationID string `json:"retry_correlation_id,omitempty"`
	DedupeKeyHash      string `json:"dedupe_key_hash"`
}

func (p *program) version() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version and the revision of this build", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			version, revision := obs.Build()
			_, err := fmt.Fprintf(p.out, "gpuaas-node-agent %s (%s)\n", version, revision)
			return err
		},
	}
}
