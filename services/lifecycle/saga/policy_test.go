package saga_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// The policy is read whenever it is needed, so that it applies to live runs too.
func TestStallsAndGraceFollowThePolicy(t *testing.T) {
	testkit.IO(t)
	var quiet, long, grace atomic.Int64
	grace.Store(int64(time.Hour))
	held := make(chan struct{})
	defer close(held)
	steps := sagatest.PureSteps("wait", "wedged")
	steps[0].StallAfter, steps[0].Budget = 100*time.Hour, 1000*time.Hour
	var calls atomic.Int32
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) > 1 {
			return saga.Done(nil), nil
		}
		return saga.Wait(saga.WaitFor{For: 1000 * time.Hour, Why: "nothing moves", WakeOnSignal: true}), nil
	}
	steps[1].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		<-held // it does not end with its context
		return saga.Done(nil), nil
	}
	b := sagatest.NewBed(t)
	registry, err := saga.NewRegistry(saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(),
		StallAfter: 500 * time.Hour, Deadline: 1000 * time.Hour,
	})
	if err != nil {
		t.Fatal(err)
	}
	b.Core, err = saga.New(saga.Deps{
		DB: b.DB.Pool(pg.RoleLifecycle), Registry: registry, Logger: testkit.Logger(t),
		Stalls: func(_, step string) time.Duration {
			if step == "" {
				return time.Duration(long.Load())
			}
			return time.Duration(quiet.Load())
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg := b.Config("a")
	cfg.StallSweep, cfg.GraceNow = time.Hour, func() time.Duration { return time.Duration(grace.Load()) }
	b.Drive(cfg)
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "waiting")
	testkit.SetClockOffset(b.DB, 50*time.Hour)
	flagged := func(prefix string, want int) {
		t.Helper()
		n, err := stall.Mark(testkit.Context(t), b.Core, 1000*time.Hour)
		if r := b.Run(id); err != nil || n != want || !strings.HasPrefix(r.StuckReason, prefix) ||
			(prefix == "" && r.StuckReason != "") {
			t.Fatalf("%d flagged, %q: %v", n, r.StuckReason, err)
		}
	}
	flagged("", 0)
	long.Store(int64(40 * time.Hour))
	flagged("run_stalled", 1)
	quiet.Store(int64(40 * time.Hour))
	flagged("step_stalled", 1)

	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); r.StepName() != "wedged" {
			return sagatest.ErrBoom
		}
		return nil
	})
	grace.Store(int64(time.Millisecond))
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := b.Core.Cancel(ctx, tx, id, "op", "enough")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	b.Await(id, testkit.Patience, "failed")
	if list := b.Timeline(id); list[1].State != "abandoned" {
		t.Errorf("the step that did not end with its context is %s", list[1].State)
	}
}
