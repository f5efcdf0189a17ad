package stall_test

import (
	"context"
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
)

// A waiting step is called repeatedly. Its stall flag stays until it makes progress or succeeds: neither a call that
// finds nothing nor the end of an attempt clears it.
func TestAStalledStepStaysFlaggedWhileItIsCalledAgain(t *testing.T) {
	testkit.IO(t)
	var calls atomic.Int32
	steps := sagatest.PureSteps("wait")
	steps[0].StallAfter, steps[0].Budget = 10*time.Hour, 1000*time.Hour
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		n := calls.Add(1)
		switch n {
		case 3:
			if err := env.Progress(ctx, "pods 1/3"); err != nil {
				return saga.Outcome{}, err
			}
		case 4:
			return saga.Outcome{}, sagatest.ErrBoom
		case 6, 7:
			// The second attempt first reports the text with which the first ended, and then another.
			if err := env.Progress(ctx, fmt.Sprintf("pods %d/3", n-5)); err != nil {
				return saga.Outcome{}, err
			}
		case 9:
			return saga.Done(nil), nil
		}
		return saga.Wait(saga.WaitFor{For: 1000 * time.Hour, Why: fmt.Sprintf("look %d", n), WakeOnSignal: true}), nil
	}
	b := sagatest.NewBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: 1000 * time.Hour,
		Deadline: 1000 * time.Hour,
	})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	parked := func(why string, attempts int, stalled bool, flagged ...bool) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.Run(id); r.State != "waiting" || r.WhyWaiting != why {
				return fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
			}
			return nil
		})
		r, list := b.Run(id), b.Timeline(id)
		if len(list) != attempts || list[attempts-1].Stalled != stalled ||
			strings.HasPrefix(r.StuckReason, "step_stalled") != (stalled || len(flagged) > 0) {
			t.Fatalf("at %q: %d attempts, stalled %v, stuck reason %q", why, len(list), list[len(list)-1].Stalled, r.StuckReason)
		}
	}
	flag := func() {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.Run(id); !strings.HasPrefix(r.StuckReason, "step_stalled") {
				return fmt.Errorf("stuck reason %q", r.StuckReason)
			}
			return nil
		})
	}
	wake := func() {
		t.Helper()
		if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
			t.Fatal(err)
		}
	}
	parked("look 1", 1, false)
	testkit.SetClockOffset(b.DB, 11*time.Hour)
	flag()
	wake()
	parked("look 2", 1, true)
	wake()
	parked("look 3", 1, false)
	testkit.SetClockOffset(b.DB, 22*time.Hour)
	flag()
	wake() // it fails, and is tried again: the step has not succeeded
	parked("look 5", 2, false, true)
	wake()
	parked("look 6", 2, false, true)
	wake()
	parked("look 7", 2, false)
	testkit.SetClockOffset(b.DB, 33*time.Hour)
	flag()
	wake()
	parked("look 8", 2, true)
	wake()
	if r := b.Await(id, testkit.Patience, "succeeded"); r.StuckReason != "" {
		t.Errorf("what has succeeded is still flagged: %q", r.StuckReason)
	}
}

// A step that reports the same text repeatedly has made no progress: its stall clock is not reset and its row is not
// written. The loss of a driver does not change that.
func TestOnlyNewReportsAreProgress(t *testing.T) {
	testkit.IO(t)
	var calls atomic.Int32
	steps := sagatest.PureSteps("wait")
	steps[0].StallAfter, steps[0].Budget = 10*time.Hour, 1000*time.Hour
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		n := calls.Add(1)
		note := "pods 1/3"
		if n >= 5 {
			note = "pods 2/3"
		}
		for range 3 {
			if err := env.Progress(ctx, note); err != nil {
				return saga.Outcome{}, err
			}
		}
		return saga.Wait(saga.WaitFor{For: 1000 * time.Hour, Why: fmt.Sprintf("look %d", n), WakeOnSignal: true}), nil
	}
	b := sagatest.NewBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), StallAfter: 1000 * time.Hour,
		Deadline: 1000 * time.Hour,
	})
	cfg := b.Config("a")
	cfg.Lease, cfg.Heartbeat = time.Hour, 20*time.Minute // a heartbeat changes the row as well
	stop := b.Drive(cfg)
	_, id := b.Create("toy")
	read := func(n int) (runs.Run, runs.Attempt) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if r := b.Run(id); r.State != "waiting" || r.WhyWaiting != fmt.Sprintf("look %d", n) {
				return fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
			}
			return nil
		})
		list := b.Timeline(id)
		return b.Run(id), list[len(list)-1]
	}
	wake := func() {
		t.Helper()
		if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
			t.Fatal(err)
		}
	}
	_, first := read(1)
	wake()
	_, again := read(2)
	// Leased and parked: two changes, and none by its progress texts.
	if first.ProgressAt == nil || !again.ProgressAt.Equal(*first.ProgressAt) || again.Version != first.Version+2 {
		t.Errorf("the same words moved the clock from %v to %v, the row from %d to %d", first.ProgressAt, again.ProgressAt,
			first.Version, again.Version)
	}
	testkit.SetClockOffset(b.DB, 11*time.Hour)
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := b.Run(id); !strings.HasPrefix(r.StuckReason, "step_stalled") {
			return fmt.Errorf("stuck reason %q", r.StuckReason)
		}
		return nil
	})
	wake()
	if r, a := read(3); !strings.HasPrefix(r.StuckReason, "step_stalled") || !a.Stalled {
		t.Errorf("the same words took the flag back: %q, stalled %v", r.StuckReason, a.Stalled)
	}
	stop()
	// Its driver was lost, and the next begins an attempt of its own.
	b.Exec(`UPDATE lifecycle.saga_step SET state = 'lost', finished_at = mesh.clock() WHERE run_id = $1`, id)
	b.Drive(b.Config("b"))
	wake()
	r, a := read(4)
	if a.Attempt != 2 || a.Progress != "pods 1/3" || a.ProgressAt != nil ||
		!strings.HasPrefix(r.StuckReason, "step_stalled") {
		t.Errorf("after a lost driver: attempt %d says %q at %v, and the run is %q", a.Attempt, a.Progress, a.ProgressAt,
			r.StuckReason)
	}
	wake()
	if r, a := read(5); r.StuckReason != "" || a.Stalled || a.ProgressAt == nil {
		t.Errorf("new words left the flag: %q, stalled %v", r.StuckReason, a.Stalled)
	}
}
