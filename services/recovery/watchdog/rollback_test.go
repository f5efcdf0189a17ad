package watchdog_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
)

// rollback sets or ends rollback mode as the schema's owner may.
func (k *kit) rollback(state string) {
	k.t.Helper()
	_, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.rollback SET state = $1, since = mesh.clock()`, state)
	k.must(err)
}

// In rollback mode the watchdog makes no decision and no request: a workspace that is active in the database may have
// been decommissioned since.
func TestRollbackModeStopsTheWatchdog(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "w", byProcess, ids.New())
	k.rollback("active")
	k.lose(b)
	k.listen(130 * time.Second)
	out := k.round()
	k.detect()
	k.wantAsked(0)
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 0 {
		t.Fatalf("%d recoveries were opened", n)
	}
	if !out.RolledBack || !out.Leased {
		t.Errorf("%+v", out)
	}
	k.must(k.all.Measure(k.ctx))
	k.metric("rollback_mode_active", "", 1)
	ada := rpc.WithPerson(k.ctx, rpc.Person{Subject: "ada", Roles: []string{"operator"}})
	if _, err := k.all.ReleaseBrake(ada, &recoveryv1.ReleaseBrakeRequest{Reason: "go on"}); !fault.Has(err,
		commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) {
		t.Errorf("the brake: %v", err)
	}
	k.rollback("none")
	k.detect()
	k.wantAsked(1)
}

// A request that was stored and not answered is not sent again while the mode is active.
func TestRollbackModeRepeatsNoRequest(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "w", byProcess, ids.New())
	k.owner.set(func() { k.owner.after = func() error { return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "") } })
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(1)
	k.owner.set(func() { k.owner.after = nil })
	k.rollback("active")
	k.listen(10 * time.Minute)
	k.round()
	k.wantAsked(1)
}
