package drive_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// TestABudgetEndsWhatStandsInTheWay: an attempt goes on waiting while it shows an error (WaitFor.Meanwhile). When its
// budget is used up it fails as past its deadline, with that error and the last output, whether or not the step is
// called once more before.
func TestABudgetEndsWhatStandsInTheWay(t *testing.T) {
	testkit.IO(t)
	const said, words, budget = "workload main exited with status 7", "no such file: model.bin", 2 * time.Hour
	var calls atomic.Int32
	steps := sagatest.PureSteps("wait")
	steps[0].Budget, steps[0].Retry = budget, saga.RetryPolicy{Attempts: 1}
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		calls.Add(1)
		return saga.Wait(saga.WaitFor{For: 1000 * time.Hour, Why: said, WakeOnSignal: true, Meanwhile: &saga.StepError{
			Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD, Reason: commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP, Public: said,
			LastOutput: words,
		}}), nil
	}
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), Deadline: 100 * time.Hour,
	})
	b.Drive(b.Config("a"))
	_, id := b.Create("toy")
	r := b.Await(id, testkit.Patience, "waiting")
	attempt := func() runs.Attempt {
		t.Helper()
		all, err := runs.Timeline(testkit.Context(t), b.DB.Pool(pg.RoleLifecycle), id)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range all {
			if a.Name == "wait" && a.Dir == "do" {
				return a
			}
		}
		t.Fatalf("no attempt in %+v", all)
		return runs.Attempt{}
	}
	if a := attempt(); a.State != "waiting" || a.Error != said || a.ErrorLayer != "workload" || a.LastOutput != words {
		t.Errorf("while it waits: %+v", a)
	}
	if r.WhyWaiting != said {
		t.Errorf("the run waits for %q", r.WhyWaiting)
	}
	// Woken within the budget, the step is called again and goes on waiting, in the same attempt.
	before := calls.Load()
	if err := b.Tx(func(ctx context.Context, tx pgx.Tx) error { return b.Core.Wake(ctx, tx, id) }); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if calls.Load() == before || b.Run(id).State != "waiting" {
			return sagatest.ErrBoom
		}
		return nil
	})
	if a := attempt(); a.Attempt != 1 || a.State != "waiting" {
		t.Errorf("after another look: %+v", a)
	}
	testkit.SetClockOffset(b.DB, budget+time.Minute)
	b.Await(id, testkit.Patience, "failed")
	a := attempt()
	if a.State != "failed" || a.ErrorCode != "deadline_of_step_exceeded" || !strings.Contains(a.Error, said) ||
		!strings.Contains(a.Error, "2h0m0s") ||
		a.LastOutput != words {
		t.Errorf("after its budget: %+v", a)
	}
}
