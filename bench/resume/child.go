package resume

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// childDriver is the process that is killed: a driver in the middle of the steps of every run.
const childDriver = "resume-driver"

type driverConfig struct {
	LifecycleURL, SequencerURL string
	Lease                      time.Duration
	Runs                       int
}

// Child serves a child process of this bench, until in ends; false if the kind is not one of its own.
func Child(ctx context.Context, kind string, in io.Reader, out io.Writer, logger *slog.Logger) (bool, error) {
	if kind != childDriver {
		return false, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	defer loops.Wait()
	defer cancel()
	begun := &tally{at: map[string]time.Time{}}
	err := process.Serve(ctx, in, out, process.Verbs{
		"drive": process.With(func(_ context.Context, cfg driverConfig) (any, error) {
			r, err := newReplica(ctx, Options{
				LifecycleURL: cfg.LifecycleURL, SequencerURL: cfg.SequencerURL, Lease: cfg.Lease, Runs: cfg.Runs, Logger: logger,
			}, func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
				begun.note(env.WorkspaceID)
				<-ctx.Done() // it is killed first
				return saga.Outcome{}, context.Cause(ctx)
			})
			if err != nil {
				return nil, err
			}
			loops.Go(func() {
				defer r.Close()
				r.Run(ctx)
			})
			return nil, nil
		}),
		"begun": func(context.Context, json.RawMessage) (any, error) { return begun.count(), nil },
	})
	return true, err
}

// tally notes when each workspace's step began first.
type tally struct {
	mu sync.Mutex
	at map[string]time.Time
}

func (t *tally) note(workspace string) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.at[workspace]; !ok {
		t.at[workspace] = now
	}
}

func (t *tally) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.at)
}

// when returns when the step of a workspace began, false if it did not.
func (t *tally) when(workspace string) (time.Time, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at, ok := t.at[workspace]
	return at, ok
}
