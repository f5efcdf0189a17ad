package saga_test

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
)

// A step that waits looks again all the time. What was said of its stall stays said until it moves or fails: a look that finds nothing is no recovery.
func TestAStalledStepStaysFlaggedWhileItLooksAgain(t *testing.T) {
	testkit.IO(t)
	var looks atomic.Int32
	steps := pureSteps("wait")
	steps[0].StallAfter, steps[0].Budget = 10*time.Hour, 1000*time.Hour
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		n := looks.Add(1)
		switch n {
		case 3:
			if err := env.Progress(ctx, "pods 1/3"); err != nil {
				return saga.Outcome{}, err
			}
		case 4:
			return saga.Outcome{}, errBoom
		}
		return saga.Wait(saga.WaitFor{For: 1000 * time.Hour, Why: fmt.Sprintf("look %d", n), WakeOnSignal: true}), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: states(), StallAfter: 1000 * time.Hour, Deadline: 1000 * time.Hour})
	b.drive(b.config("a"))
	_, id := b.create("toy")
	parked := func(why string, attempts int, stalled bool) {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, func() error {
			if r := b.run(id); r.State != "waiting" || r.WhyWaiting != why {
				return fmt.Errorf("run is %s: %s", r.State, r.WhyWaiting)
			}
			return nil
		})
		r, list := b.run(id), b.timeline(id)
		if len(list) != attempts || list[attempts-1].Stalled != stalled || strings.HasPrefix(r.StuckReason, "step_stalled") != stalled {
			t.Fatalf("at %q: %d attempts, stalled %v, stuck reason %q", why, len(list), list[len(list)-1].Stalled, r.StuckReason)
		}
	}
	flag := func() {
		t.Helper()
		testkit.Eventually(t, 5*time.Second, func() error {
			if r := b.run(id); !strings.HasPrefix(r.StuckReason, "step_stalled") {
				return fmt.Errorf("stuck reason %q", r.StuckReason)
			}
			return nil
		})
	}
	wake := func() {
		t.Helper()
		if err := b.tx(func(ctx context.Context, tx pgx.Tx) error { return b.core.Wake(ctx, tx, id) }); err != nil {
			t.Fatal(err)
		}
	}
	parked("look 1", 1, false)
	testkit.SetClockOffset(b.db, 11*time.Hour)
	flag()
	wake()
	parked("look 2", 1, true)
	wake()
	parked("look 3", 1, false)
	testkit.SetClockOffset(b.db, 22*time.Hour)
	flag()
	wake() // it fails, and is tried again
	parked("look 5", 2, false)
}
