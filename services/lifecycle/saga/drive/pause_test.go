package drive_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// still waits until the run is paused because of rollback mode, in the given state.
func (b *bed) still(id, state string) runs.Run {
	b.T.Helper()
	var r runs.Run
	testkit.Eventually(b.T, testkit.Patience, func() error {
		if r = b.Run(id); r.State != state || !strings.HasPrefix(r.WhyWaiting, "control_plane_rollback") {
			return fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
		}
		return nil
	})
	return r
}

// A run is paused in rollback mode, with the reason on its timeline, and goes on afterwards with all the time that it
// had left: the mode does not count for a budget, a deadline or a stall, and no attempt is used up.
func TestRunsStandStillInRollbackMode(t *testing.T) {
	testkit.IO(t)
	var calls atomic.Int32
	steps := sagatest.PureSteps("first", "second")
	steps[0].Budget, steps[0].StallAfter = time.Hour, time.Hour
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		if calls.Add(1) == 1 {
			return saga.Wait(saga.WaitFor{For: time.Minute, Why: "parked before the mode", WakeOnSignal: true}), nil
		}
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: 2 * time.Hour,
		Deadline: 90 * time.Minute,
	})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); r.WhyWaiting != "parked before the mode" {
			return fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
		}
		return nil
	})
	testkit.SetRollback(b.DB, true)
	testkit.SetClockOffset(b.DB, 2*time.Minute) // it is due
	b.still(id, "waiting")
	if list := b.Timeline(id); len(list) != 1 || !strings.HasPrefix(list[0].WhyWaiting, "control_plane_rollback") {
		t.Errorf("the timeline shows %+v", list)
	}
	testkit.SetClockOffset(b.DB, 50*time.Hour) // past every deadline
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	if n, err := stall.Mark(t.Context(), b.Core, time.Second); err != nil || n != 0 {
		t.Errorf("%d stalls were flagged, %v", n, err)
	}
	if n := calls.Load(); n != 1 {
		t.Errorf("the step was called %d times in the mode", n)
	}
	testkit.SetRollback(b.DB, false)
	r := b.Await(id, testkit.Patience, "succeeded", "failed")
	if r.State != "succeeded" || r.StuckReason != "" {
		t.Errorf("run is %s (%s): %s", r.State, r.StuckReason, r.Error)
	}
	list := b.Timeline(id)
	if len(list) != 2 || list[0].Attempt != 1 || list[0].Stalled {
		t.Errorf("the timeline shows %+v", list)
	}
}

// An undo is paused as well: it begins after the mode at the earliest.
func TestUndosStandStillInRollbackMode(t *testing.T) {
	testkit.IO(t)
	var b *bed
	var undone, inMode atomic.Int32
	steps := sagatest.PureSteps("make", "fail")
	steps[0].Undo = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		undone.Add(1)
		var on bool
		if err := b.DB.OwnerPool().QueryRow(ctx, `SELECT mesh.rolled_back()`).Scan(&on); err != nil || on {
			inMode.Add(1)
		}
		return saga.Done(nil), nil
	}
	gate := make(chan struct{})
	steps[1].Retry = saga.RetryPolicy{Attempts: 1}
	steps[1].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		select {
		case <-gate:
			return saga.Outcome{}, sagatest.ErrBoom
		case <-ctx.Done():
			return saga.Outcome{}, ctx.Err()
		}
	}
	b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); r.Step != 1 {
			return fmt.Errorf("run is at step %d", r.Step)
		}
		return nil
	})
	testkit.SetRollback(b.DB, true)
	close(gate)
	b.still(id, "compensating")
	if undone.Load() != 0 {
		t.Fatal("the undo ran in the mode")
	}
	testkit.SetRollback(b.DB, false)
	b.Await(id, testkit.Patience, "failed")
	if undone.Load() != 1 || inMode.Load() != 0 {
		t.Errorf("undone %d times, %d in the mode", undone.Load(), inMode.Load())
	}
}

// A step that is under way when the mode is set is stopped at its next effect, without a failed attempt.
func TestAStepUnderWayStopsAtItsNextEffect(t *testing.T) {
	testkit.IO(t)
	var effects atomic.Int32
	var verdict atomic.Value
	entered, gate := make(chan struct{}, 1), make(chan struct{})
	steps := sagatest.PureSteps("act")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		select {
		case entered <- struct{}{}:
		default:
		}
		select {
		case <-gate:
		case <-ctx.Done():
			return saga.Outcome{}, ctx.Err()
		}
		if err := env.Proceed(ctx); err != nil {
			verdict.Store(err)
			return saga.Outcome{}, fmt.Errorf("go on: %w", err)
		}
		effects.Add(1)
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	<-entered
	testkit.SetRollback(b.DB, true)
	close(gate)
	b.still(id, "waiting")
	if err, _ := verdict.Load().(error); effects.Load() != 0 || !errors.Is(err, saga.ErrPaused) {
		t.Errorf("%d effects; the step was told %v", effects.Load(), err)
	}
	testkit.SetRollback(b.DB, false)
	b.Await(id, testkit.Patience, "succeeded")
	if list := b.Timeline(id); len(list) != 1 || effects.Load() != 1 {
		t.Errorf("%d effects over %d attempts", effects.Load(), len(list))
	}
}
