package enrol_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

const rolledBack = commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK

// enter sets rollback mode as the schema's owner does.
func (k *kit) enter() {
	k.t.Helper()
	if _, err := k.db.OwnerPool().Exec(k.ctx, `UPDATE recovery.rollback SET state = 'active', declared = true, since =
		mesh.clock()`); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) waits(what string, err error) {
	k.t.Helper()
	if fault.ReasonOf(err) != rolledBack || fault.ActionOf(err) != commonv1.Action_ACTION_WAIT {
		k.t.Errorf("%s: %v", what, err)
	}
}

// An instance that the database would refuse for good is told to wait in rollback mode: its epoch or its secret may be
// of the history that is lost.
func TestRollbackModeStopsNoInstance(t *testing.T) {
	k := newKit(t)
	ws := ids.New()
	old := k.prepare(ws, 1)
	k.prepare(ws, 2)
	_, err := k.enroll(old.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	ended := k.prepare(ids.New(), 1)
	if err := k.instances.Retire(k.ctx, &recoveryv1.RetireInstanceRequest{
		InstanceId:  ended.instance,
		WorkspaceId: ids.New(), Epoch: 1,
	}); err != nil {
		t.Fatal(err)
	}
	_, err = k.enroll(ended.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_ENDED)
	lost, _ := newSecret(ids.New())
	_, err = k.enroll(lost, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
	k.enter()
	before := k.record(old.node)
	_, err = k.enroll(old.secret, k.csr())
	k.waits("a box of a lower epoch", err)
	_, err = k.enroll(ended.secret, k.csr())
	k.waits("a box that was retired", err)
	_, err = k.enroll(lost, k.csr())
	k.waits("a box that the database does not know", err)
	if after := k.record(old.node); after.RefusedRegisters != before.RefusedRegisters || after.Notice != before.Notice {
		t.Errorf("the refusal was counted: %+v", after)
	}
}

// A secret whose certificate was never used, as far as the database knows, mints no second one: the first may be in
// use.
func TestRollbackModeMintsNoSecond(t *testing.T) {
	k := newKit(t)
	b := k.prepare(ids.New(), 1)
	k.mustEnroll(b.secret, k.csr())
	testkit.SetClockOffset(k.db, 31*time.Second)
	k.enter()
	_, err := k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_MINT_CONSUMED)
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE state = 'revoked'`); n != 0 {
		t.Errorf("%d certificates were revoked", n)
	}
}

// In the mode nothing is prepared, retired, issued or swept, and no second key puts a node on hold.
func TestRollbackModeEndsAndBeginsNothing(t *testing.T) {
	k := newKit(t)
	b := k.prepare(ids.New(), 1)
	bundle := k.bootstrap("one")
	k.mustEnroll(bundle.Token, k.csr())
	testkit.SetClockOffset(k.db, 48*time.Hour)
	k.enter()
	before := k.snapshot()
	_, hash := newSecret(ids.New())
	_, err := k.instances.Prepare(k.ctx, &recoveryv1.PrepareInstanceRequest{
		WorkspaceId: ids.New(), TenantId: ids.New(), Epoch: 1, InstanceId: ids.New(), SecretSha256: hash, NodeName: "box",
	})
	k.waits("prepare", err)
	k.waits("retire", k.instances.Retire(k.ctx, &recoveryv1.RetireInstanceRequest{
		InstanceId:  b.instance,
		WorkspaceId: b.workspace, Epoch: 1,
	}))
	_, err = k.enroller.IssueBootstrap(k.ctx, "two", "", 0, "", "ada")
	k.waits("bootstrap", err)
	if swept, err := k.enroller.Sweep(k.ctx); err != nil || swept != (enrol.Swept{}) {
		t.Errorf("swept %+v, %v", swept, err)
	}
	if k.snapshot() != before {
		t.Error("something was changed")
	}
	testkit.SetClockOffset(k.db, 0)
	_, err = k.enroll(bundle.Token, k.csr())
	k.waits("a second key", err)
	if k.snapshot() != before {
		t.Error("a second key changed something")
	}
}
