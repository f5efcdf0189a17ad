package judge_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	rollbacks "github.com/gpuaas/mesh/services/recovery/rollback"
)

// TestARollbackIsJudgedByItsEvent checks that the judge looks at once when rollback mode begins, whether evidence or a
// person began it, and when it is accepted: by the event of each, and not when its next round is due.
func TestARollbackIsJudgedByItsEvent(t *testing.T) {
	const rolledBack = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK
	k := newKit(t)
	n := k.up()
	mode, err := rollbacks.New(rollbacks.Deps{Logger: testkit.Logger(t), Pool: k.db.Pool(pg.RoleRecovery)})
	k.must(err)
	byEvent := func(what string, do func()) {
		t.Helper()
		paused := k.judge.Pause(time.Hour)
		do()
		k.must(k.sequencer.Drain(k.ctx))
		k.must(k.judge.Drain(k.ctx))
		ctx, cancel := context.WithTimeout(k.ctx, testkit.Patience)
		defer cancel()
		if !paused(ctx) {
			t.Fatalf("%s: the judge does not look before its next round is due", what)
		}
		k.round()
	}
	accept := func() {
		t.Helper()
		_, err := mode.AcceptRollback(rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}}),
			&recoveryv1.AcceptRollbackRequest{Reason: "compared"})
		k.must(err)
	}
	byEvent("a node remembers more", func() {
		t.Helper()
		k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := rollbacks.Record(ctx, tx, rollbacks.Evidence{
				Kind: recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD, Subject: n.id(), Remembered: 3, Known: 2,
			})
			return err
		}))
	})
	k.wantReasons(theFleet, rolledBack)
	byEvent("it is accepted", accept)
	k.wantReasons(theFleet, rolledBack, unspecified)
	byEvent("a restore is declared", func() {
		t.Helper()
		_, err := k.db.OwnerPool().Exec(k.ctx, `SELECT mesh.raise_era_after_rollback('the disk was lost')`)
		k.must(err)
		_, err = k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.rollback SET state = 'active', declared = true,
			since = mesh.clock(), incident_id = '', version = version + 1`)
		k.must(err)
		k.must(mode.Sync(k.ctx))
	})
	k.wantReasons(theFleet, rolledBack, unspecified, rolledBack)
}
