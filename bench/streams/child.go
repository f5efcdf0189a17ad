package streams

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/nodeapi/nodeapitest"
)

// Kinds of children.
const (
	childNodeAPI = "streams-nodeapi"
	childBare    = "streams-bare"
	childAgents  = "streams-agents"
)

// serverConfig is the configuration of a server child.
type serverConfig struct {
	Files               nodeapitest.Files
	Database, Sequencer string // files with the URLs
	Recovery, Lifecycle string
}

// agentsConfig is the configuration of the load.
type agentsConfig struct {
	Addr     string
	N        int
	Sessions bool
	Every    time.Duration
}

// Child serves a child process of this bench, until in ends; false if the kind is not one of its own.
func Child(ctx context.Context, kind string, in io.Reader, out io.Writer, logger *slog.Logger) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch kind {
	case childNodeAPI:
		return true, serveNodeAPI(ctx, cancel, in, out, logger)
	case childBare:
		return true, process.Serve(ctx, in, out, process.Verbs{
			"start": process.With(func(_ context.Context, cfg serverConfig) (any, error) {
				return startBare(ctx, cfg.Files)
			}),
			"measure": measure,
		})
	case childAgents:
		return true, serveAgents(ctx, in, out)
	default:
		return false, nil
	}
}

func measure(context.Context, json.RawMessage) (any, error) {
	return process.Measure()
}

// serveNodeAPI runs a replica of nodeapi and nothing else.
func serveNodeAPI(ctx context.Context, cancel context.CancelFunc, in io.Reader, out io.Writer,
	logger *slog.Logger,
) error {
	defer app.BoundHeap()() // as a process of nodeapi does
	done := make(chan error, 1)
	started := false
	err := process.Serve(ctx, in, out, process.Verbs{
		"start": process.With(func(_ context.Context, given serverConfig) (any, error) {
			cfg := nodeapi.Default()
			cfg.TrustDomain = nodeapitest.TrustDomain
			cfg.DatabaseURLFile, cfg.SequencerURLFile = config.SecretFile(given.Database), config.SecretFile(given.Sequencer)
			cfg.TLS.CertFile, cfg.TLS.KeyFile, cfg.TLS.CAFile, cfg.NodeCAFile = given.Files.Cert, given.Files.Key,
				given.Files.ServiceCA, given.Files.NodeCA
			cfg.Peers.Recovery, cfg.Peers.Lifecycle = given.Recovery, given.Lifecycle
			cfg.DrainTimeout = time.Second
			registry, err := obs.NewRegistry()
			if err != nil {
				return nil, fmt.Errorf("make registry: %w", err)
			}
			s, err := nodeapi.New(ctx, nodeapi.Deps{Logger: logger, Registry: registry}, cfg)
			if err != nil {
				return nil, fmt.Errorf("build nodeapi: %w", err)
			}
			started = true
			go func() { done <- s.Run(ctx) }() // awaited below
			return s.AgentAddr(), nil
		}),
		"measure": measure,
	})
	cancel()
	if started {
		err = errors.Join(err, <-done)
	}
	return err
}

func serveAgents(ctx context.Context, in io.Reader, out io.Writer) error {
	var f *fleet
	err := process.Serve(ctx, in, out, process.Verbs{
		"trust": process.With(func(_ context.Context, given trust) (any, error) {
			var err error
			f, err = newFleet(given)
			return nil, err
		}),
		"connect": process.With(func(ctx context.Context, cfg agentsConfig) (any, error) {
			return nil, f.connect(ctx, cfg.Addr, cfg.N, cfg.Sessions, cfg.Every)
		}),
		"status": func(context.Context, json.RawMessage) (any, error) { return f.status() },
		"leave":  func(context.Context, json.RawMessage) (any, error) { return nil, f.leave() },
	})
	if f != nil {
		err = errors.Join(err, f.leave())
	}
	return err
}
