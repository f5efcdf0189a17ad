package trust

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// Scenario: a mismatch is a recovery action of the control plane, under the correlation id of its incident, that ends
// with the mismatch. That another address refuses too is no second one.
func TestAMismatchIsARecoveryAction(t *testing.T) {
	testkit.IO(t)
	ctx, pool := testkit.Context(t), testkit.DB(t).Pool(pg.RoleRecovery)
	p := &Preflight{}
	enter := func(state string) *preflightRow {
		t.Helper()
		var row preflightRow
		err := pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			was, err := pg.One[preflightRow](ctx, tx, lockRow)
			if err != nil {
				return err
			}
			m, err := pg.Value[time.Time](ctx, tx, readClock)
			if err != nil {
				return err
			}
			row = was
			row.State, row.Since, row.CheckedAt = state, &m, &m
			if state != stateMismatch {
				row.IncidentID = ""
			}
			if err := p.enter(ctx, tx, was, &row); err != nil {
				return err
			}
			return row.save(ctx, tx)
		})
		if err != nil {
			t.Fatal(err)
		}
		return &row
	}
	only := func() *recoveryv1.RecoveryAction {
		t.Helper()
		answer, err := actions.NewServer(pool).ListActions(ctx, &recoveryv1.ListActionsRequest{})
		if err != nil || len(answer.GetItems()) != 1 {
			t.Fatalf("%v %v", answer.GetItems(), err)
		}
		return answer.GetItems()[0]
	}
	incident := enter(stateMismatch).IncidentID
	if a := only(); a.GetKind() != actions.CARepair || a.GetState() != actions.StateOpen || a.GetNodeId() != "" ||
		a.GetCorrelationId() != incident || incident == "" || a.GetFirstRejectedAt() == nil {
		t.Fatalf("%v", a)
	}
	enter(stateMismatch)
	if a := only(); a.GetVersion() != 1 {
		t.Errorf("%v", a)
	}
	enter(stateOK)
	if a := only(); a.GetState() != actions.StateSucceeded || a.GetCorrelationId() != incident {
		t.Errorf("%v", a)
	}
}
