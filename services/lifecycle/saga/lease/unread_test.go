package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/saga/stall"
)

// Runs of a kind and in a phase that this build does not know are not leased, stay as they are stored, and are reported
// with the runs that no driver has taken up. The others go on.
func TestARunOfAnUnknownKindOrPhaseStopsNoOther(t *testing.T) {
	testkit.IO(t)
	calls := 0
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, States: sagatest.States(), Steps: []saga.Step{{
			Name: "one", Class: saga.Pure, Do: func(context.Context, *saga.Env) (saga.Outcome, error) {
				calls++
				return saga.Done(nil), nil
			},
		}},
	})
	reported := testkit.SetAside(t, "run")
	_, oddKind := b.Create("toy")
	_, oddPhase := b.Create("toy")
	_, plain := b.Create("toy")
	// as the migration of a newer build does
	for _, sql := range []string{
		`ALTER TABLE lifecycle.saga_run DROP CONSTRAINT is_run`,
		`UPDATE lifecycle.saga_run SET kind = 'orbit' WHERE id = '` + oddKind + `'`,
		`UPDATE lifecycle.saga_run SET phase = 'sideways' WHERE id = '` + oddPhase + `'`,
	} {
		if _, err := b.DB.OwnerPool().Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	stop := b.Drive(b.Config("a"))
	b.Await(plain, testkit.Patience, "succeeded")
	stop()
	for _, id := range []string{oddKind, oddPhase} {
		if r := b.Run(id); r.State != "pending" || r.Fence != 0 {
			t.Errorf("a run of kind %s in phase %s is %s with fence %d", r.Kind, r.Phase, r.State, r.Fence)
		}
	}
	if calls != 1 {
		t.Errorf("the step was done %d times", calls)
	}
	testkit.SetClockOffset(b.DB, time.Hour)
	if n, err := stall.Mark(t.Context(), b.Core, time.Minute); err != nil || n != 2 || reported() != 2 {
		t.Errorf("%d runs are flagged, %d are reported: %v", n, reported(), err)
	}
}
