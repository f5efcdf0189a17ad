package trust

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// mismatches is a preflight that is brought into its states.
type mismatches struct {
	t    *testing.T
	ctx  context.Context
	db   *testkit.Database
	pool *pgxpool.Pool
}

func newMismatches(t *testing.T) *mismatches {
	t.Helper()
	testkit.IO(t)
	db := testkit.DB(t)
	return &mismatches{t: t, ctx: testkit.Context(t), db: db, pool: db.Pool(pg.RoleRecovery)}
}

func (m *mismatches) enter(state string) *preflightRow {
	m.t.Helper()
	var row preflightRow
	err := pg.InTx(m.ctx, m.pool, func(ctx context.Context, tx pgx.Tx) error {
		was, err := pg.One[preflightRow](ctx, tx, lockRow)
		if err != nil {
			return err
		}
		at, err := pg.Value[time.Time](ctx, tx, readClock)
		if err != nil {
			return err
		}
		row = was
		row.State, row.CheckedAt = state, &at
		if state != was.State || was.Since == nil {
			row.Since = &at
		}
		if state != stateMismatch {
			row.IncidentID = ""
		}
		if err := (&Preflight{}).enter(ctx, tx, was, &row); err != nil {
			return err
		}
		return row.save(ctx, tx)
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return &row
}

// actions returns all actions, the newest first.
func (m *mismatches) actions(want int) []*recoveryv1.RecoveryAction {
	m.t.Helper()
	answer, err := actions.NewServer(m.pool).ListActions(m.ctx, &recoveryv1.ListActionsRequest{})
	if err != nil || len(answer.GetItems()) != want {
		m.t.Fatalf("%v %v", answer.GetItems(), err)
	}
	return answer.GetItems()
}

// fail has the open action fail, as its time is over.
func (m *mismatches) fail() {
	m.t.Helper()
	if _, err := m.db.OwnerPool().Exec(m.ctx, `UPDATE recovery.recovery_action SET fails_at = mesh.clock()
		WHERE state = 'open'`); err != nil {
		m.t.Fatal(err)
	}
	if failed, err := actions.Sweep(m.ctx, m.pool); err != nil || failed != 1 {
		m.t.Fatalf("%d failed: %v", failed, err)
	}
}

// Scenario: a mismatch is a recovery action of the control plane, under the correlation id of its incident, that ends
// with the mismatch. That another address refuses too is no second one.
func TestAMismatchIsARecoveryAction(t *testing.T) {
	m := newMismatches(t)
	incident := m.enter(stateMismatch).IncidentID
	if a := m.actions(1)[0]; a.GetKind() != actions.CARepair || a.GetState() != actions.StateOpen || a.GetNodeId() != "" ||
		a.GetCorrelationId() != incident || incident == "" || a.GetFirstRejectedAt() == nil {
		t.Fatalf("%v", a)
	}
	m.enter(stateMismatch)
	if a := m.actions(1)[0]; a.GetVersion() != 1 {
		t.Errorf("%v", a)
	}
	m.enter(stateOK)
	if a := m.actions(1)[0]; a.GetState() != actions.StateSucceeded || a.GetCorrelationId() != incident {
		t.Errorf("%v", a)
	}
}

// TestAMismatchThatEndsAfterItsActionFailed: the ingress is repaired outside of the mesh, after the action has failed.
// The action stays no failure, and says how the mismatch has ended. One of a mismatch before it stays as it is.
func TestAMismatchThatEndsAfterItsActionFailed(t *testing.T) {
	m := newMismatches(t)
	m.enter(stateMismatch)
	m.enter(stateOK)
	incident := m.enter(stateMismatch).IncidentID
	m.fail()
	failed := m.actions(2)[0]
	m.enter(stateOK)
	list := m.actions(2)
	a := list[0]
	if a.GetState() != actions.StateSuperseded || a.GetCorrelationId() != incident || a.GetHealthyAt() == nil ||
		!a.GetEndedAt().AsTime().Equal(failed.GetEndedAt().AsTime()) || a.GetVersion() != failed.GetVersion()+1 ||
		!strings.HasPrefix(a.GetOutcome(), "the ingress trusts what the authority signs, without this action; before: ") {
		t.Errorf("%v", a)
	}
	if list[1].GetState() != actions.StateSucceeded {
		t.Errorf("%v", list[1])
	}
	evs := testkit.Events(t, m.pool, "kind = 'recovery_action.changed' AND aggregate_id = $1", a.GetActionId())
	if len(evs) != 3 {
		t.Errorf("%d events of it, want those of its begin, its failure and its end", len(evs))
	}
}

// TestARepairThatFailedIsBegunAgain: an action that outlives its time names what to do. A repair, or a mismatch that
// changes, begins one more under the same incident, one at a time, and that one succeeds.
func TestARepairThatFailedIsBegunAgain(t *testing.T) {
	m := newMismatches(t)
	incident := m.enter(stateMismatch).IncidentID
	first := m.actions(1)[0]
	m.fail()
	if a := m.actions(1)[0]; a.GetState() != actions.StateFailed || !strings.Contains(a.GetOutcome(), "gpuaas ca repair") {
		t.Fatalf("%v", a)
	}
	m.enter(stateMismatch) // another address refuses too
	a := m.actions(2)[0]
	if a.GetState() != actions.StateOpen || a.GetCorrelationId() != incident ||
		!a.GetFirstRejectedAt().AsTime().Equal(first.GetFirstRejectedAt().AsTime()) {
		t.Errorf("%v", a)
	}
	m.fail()
	repair := func() {
		t.Helper()
		if err := pg.InTx(m.ctx, m.pool, func(ctx context.Context, tx pgx.Tx) error {
			return noteRepaired(ctx, tx, "f", "someone")
		}); err != nil {
			t.Fatal(err)
		}
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(repair)
	}
	all.Wait()
	if a = m.actions(3)[0]; a.GetState() != actions.StateOpen || a.GetCorrelationId() != incident ||
		a.GetRequester() != "someone" || a.GetAttempts() != 8 || a.GetEffectAt() == nil {
		t.Errorf("%v", a)
	}
	m.enter(stateOK)
	if a = m.actions(3)[0]; a.GetState() != actions.StateSucceeded {
		t.Errorf("%v", a)
	}
	repair() // there is nothing to repair
	m.actions(3)
}
