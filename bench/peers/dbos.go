package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/dbos-inc/dbos-transact-golang/dbos"

	"github.com/gpuaas/mesh/bench/beside/peer"
)

// steps of a workflow, each of which does nothing.
const steps = 6

type dbosEngine struct {
	ctx dbos.Context
}

func noop(context.Context) (string, error) { return "", nil }

func sixSteps(ctx dbos.Context, _ string) (string, error) {
	for range steps {
		if _, err := dbos.RunAsStep(ctx, noop); err != nil {
			return "", err
		}
	}
	return "", nil
}

func (e *dbosEngine) start(ctx context.Context, databaseURL string, _ peer.Setup) (peer.Described, error) {
	var err error
	e.ctx, err = dbos.NewContext(ctx, dbos.Config{
		AppName: "bench", DatabaseURL: databaseURL, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return peer.Described{}, fmt.Errorf("make context: %w", err)
	}
	dbos.RegisterWorkflow(e.ctx, sixSteps)
	if err := dbos.Launch(e.ctx); err != nil {
		return peer.Described{}, fmt.Errorf("launch: %w", err)
	}
	return peer.Described{Version: version("github.com/dbos-inc/dbos-transact-golang"), Settings: map[string]any{
		"steps": steps, "configuration": "defaults", "pool": "defaults (20 connections)",
	}}, nil
}

func (e *dbosEngine) stretch(ctx context.Context, load peer.Load) (peer.Stretch, error) {
	var seen timings
	var clients sync.WaitGroup
	errs := make(chan error, load.Clients)
	began := time.Now()
	until := began.Add(load.Length)
	for range load.Clients {
		clients.Go(func() {
			for time.Now().Before(until) && ctx.Err() == nil {
				at := time.Now()
				handle, err := dbos.RunWorkflow(e.ctx, sixSteps, "")
				if err == nil {
					_, err = handle.GetResult()
				}
				if err != nil {
					errs <- fmt.Errorf("run workflow: %w", err)
					return
				}
				seen.add(at, time.Now())
			}
		})
	}
	clients.Wait()
	select {
	case err := <-errs:
		return peer.Stretch{}, err
	default:
		return seen.stretch(began), nil
	}
}

func (e *dbosEngine) stop() {
	if e.ctx != nil {
		_ = dbos.Shutdown(e.ctx, 5*time.Second)
	}
}
