package watchdog_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A workspace's state and a recovery's outcome that this build does not know: the round goes on, the open record stays
// open, and other workspaces are recovered.
func TestUnknownValuesStopNoOtherRecovery(t *testing.T) {
	k := newKit(t)
	instances := k.fleet(10)
	k.detectAll(instances[:1])
	k.wantAsked(1)
	_, err := k.db.OwnerPool().Exec(k.ctx,
		`UPDATE recovery.recovery_record SET outcome = 'withheld' WHERE ended_at IS NULL`)
	k.must(err)
	_, err = k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.watch_workspace SET state = 'stuck' WHERE workspace_id = $1`,
		instances[1].ws.GetWorkspaceId())
	k.must(err)
	testkit.WithoutValue(t, commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD)
	testkit.WithoutValue(t, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK)
	_, err = k.db.OwnerPool().Exec(k.ctx,
		`UPDATE recovery.watch_workspace SET register_failures = 3, register_failing_since = mesh.clock() - interval '1 hour'
		WHERE workspace_id = $1`, instances[1].ws.GetWorkspaceId())
	k.must(err)
	k.lose(instances[2])
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(2)
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record
		WHERE ended_at IS NULL AND outcome = 'withheld'`); n != 1 {
		t.Errorf("%d recoveries are as they were stored", n)
	}
}
