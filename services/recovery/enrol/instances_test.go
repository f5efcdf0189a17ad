package enrol_test

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

func fixedPolicy() policy.Reader { return policy.Fixed{} }

func TestPrepareIsIdempotent(t *testing.T) {
	k := newKit(t)
	ws := ids.New()
	b := k.prepare(ws, 1)
	again := func(epoch int64, instance string, hash []byte) (string, error) {
		return k.instances.Prepare(k.ctx, &recoveryv1.PrepareInstanceRequest{
			WorkspaceId: ws, TenantId: ids.New(), Epoch: epoch, InstanceId: instance, SecretSha256: hash, NodeName: "box",
		})
	}
	secret, hash := newSecret(b.instance)
	if node, err := again(1, b.instance, hash); err != nil || node != b.node {
		t.Fatalf("%s %v", node, err)
	}
	_, err := k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID) // replaced before it was used
	k.mustEnroll(secret, k.csr())
	if node, err := again(1, b.instance, hash); err != nil || node != b.node {
		t.Fatalf("after use: %s %v", node, err)
	}
	_, other := newSecret(b.instance)
	_, err = again(1, b.instance, other)
	k.refused(err, commonv1.Reason_REASON_CONFLICT)
	_, err = again(2, b.instance, hash)
	k.refused(err, commonv1.Reason_REASON_CONFLICT)
	// The epoch has its instance.
	_, err = again(1, ids.New(), other)
	k.refused(err, commonv1.Reason_REASON_CONFLICT)
	next := k.prepare(ws, 2)
	if next.node == b.node {
		t.Fatal("another epoch is the same node")
	}
	_, err = again(1, b.instance, hash)
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	_, err = again(1, ids.New(), hash)
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
}

// TestBootstrapGate is B15: an instance of the present epoch waits, one of a lower epoch stops, and this is reported to
// lifecycle.
func TestBootstrapGate(t *testing.T) {
	k := newKit(t)
	ws := ids.New()
	b := k.prepare(ws, 1)
	first := k.mustEnroll(b.secret, k.csr())
	if first.GetWorkspaceId() != ws || first.GetEpoch() != 1 || k.record(b.node).Mints != 1 {
		t.Fatalf("%v", first)
	}
	// A second key at once has to wait. After the wait, while no session was ever ready on the first certificate, it
	// mints, and the first certificate is revoked.
	csr := k.csr()
	_, err := k.enroll(b.secret, csr)
	k.refused(err, commonv1.Reason_REASON_MINT_CONSUMED)
	if r := k.record(b.node); r.RefusedRegisters != 1 || r.LastRefusal != commonv1.Reason_REASON_MINT_CONSUMED ||
		r.Notice == 0 {
		t.Fatalf("%+v", r)
	}
	testkit.SetClockOffset(k.db, 31*time.Second)
	second := k.mustEnroll(b.secret, csr)
	if second.GetNodeInstanceId() == first.GetNodeInstanceId() {
		t.Error("the node instance is the same")
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE serial = $1 AND state = 'revoked'`,
		k.serialOf(first)); n != 1 {
		t.Fatal("the first certificate lives")
	}
	if r := k.record(b.node); r.RefusedRegisters != 0 || r.LastRefusal != commonv1.Reason_REASON_UNSPECIFIED {
		t.Fatalf("it has registered, and counts %d refusals: %v", r.RefusedRegisters, r.LastRefusal)
	}
	// The same key again is no mint.
	k.mustEnroll(b.secret, csr)
	if r := k.record(b.node); r.Mints != 2 {
		t.Fatalf("%d mints", r.Mints)
	}
	for i := range 2 {
		testkit.SetClockOffset(k.db, time.Duration(31*(i+2))*time.Second)
		k.mustEnroll(b.secret, k.csr())
	}
	testkit.SetClockOffset(k.db, 200*time.Second)
	_, err = k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_MINT_CONSUMED)
	// After a later epoch was prepared the instance is told to stop.
	k.prepare(ws, 2)
	_, err = k.enroll(b.secret, csr)
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	if r := k.record(b.node); r.LastRefusal != commonv1.Reason_REASON_EPOCH_SUPERSEDED || r.RefusedRegisters != 2 {
		t.Fatalf("%+v", r)
	}
}

// TestAReadyInstanceKeepsItsMint: once a session was ready on the certificate, no other key takes it.
func TestAReadyInstanceKeepsItsMint(t *testing.T) {
	k := newKit(t)
	b := k.prepare(ids.New(), 1)
	k.mustEnroll(b.secret, k.csr())
	k.exec(`UPDATE recovery.serial SET ready_at = mesh.clock()`)
	testkit.SetClockOffset(k.db, time.Minute)
	_, err := k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_MINT_CONSUMED)
}

func TestRetireInstance(t *testing.T) {
	k := newKit(t)
	ws := ids.New()
	b := k.prepare(ws, 1)
	k.mustEnroll(b.secret, k.csr())
	retire := func(instance string) {
		t.Helper()
		err := k.instances.Retire(k.ctx,
			&recoveryv1.RetireInstanceRequest{InstanceId: instance, WorkspaceId: ws, Epoch: 1, Reason: "ended"})
		if err != nil {
			t.Fatal(err)
		}
	}
	retire(b.instance)
	r := k.record(b.node)
	if r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED || r.NextSerial != "" || r.FenceEpoch != 2 {
		t.Fatalf("%+v", r)
	}
	retire(b.instance)
	if again := k.record(b.node); again.Version != r.Version {
		t.Fatal("retiring twice changed something")
	}
	_, err := k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_ENDED)
	// A preparation that comes late finds a tombstone.
	late := ids.New()
	retire(late)
	_, hash := newSecret(late)
	_, err = k.instances.Prepare(k.ctx, &recoveryv1.PrepareInstanceRequest{
		WorkspaceId: ws, TenantId: ids.New(), Epoch: 1, InstanceId: late, SecretSha256: hash, NodeName: "box",
	})
	k.refused(err, commonv1.Reason_REASON_EPOCH_ENDED)
	// Names of retired instances are free again, and a name in use never keeps an instance from being prepared.
	first, second := k.prepare(ids.New(), 1), k.prepare(ids.New(), 1)
	if a, b := k.record(first.node).Name, k.record(second.node).Name; a != "box" || b == "box" {
		t.Fatalf("%q and %q", a, b)
	}
}

func TestRenew(t *testing.T) {
	k := newKit(t)
	b := k.bootstrap("node-1")
	resp := k.mustEnroll(b.Token, k.csr())
	session := ids.New()
	k.exec(`UPDATE recovery.serial SET state = 'current', ready_at = mesh.clock()`)
	k.exec(`UPDATE recovery.identity
		SET current_serial = next_serial, next_serial = '', issued = 1, confirmed = 1, confirmed_session_id = $1`, session)
	serial := k.serialOf(resp)
	req := func(csr []byte) *recoveryv1.RenewCertificateRequest {
		return &recoveryv1.RenewCertificateRequest{
			NodeId: b.NodeID, NodeInstanceId: resp.GetNodeInstanceId(), SessionId: session, Serial: serial, Csr: csr,
		}
	}
	renew := func(r *recoveryv1.RenewCertificateRequest) (enrol.Renewed, error) {
		return k.enroller.Renew(k.ctx, r)
	}
	csr := k.csr()
	first, err := renew(req(csr))
	if err != nil {
		t.Fatal(err)
	}
	if r := k.record(b.NodeID); r.NextSerial != first.Serial.Serial || r.CurrentSerial != serial {
		t.Fatalf("%+v", r)
	}
	again, err := renew(req(csr))
	if err != nil || again.Serial.Serial != first.Serial.Serial || string(again.ChainPEM) != string(first.ChainPEM) {
		t.Fatalf("%+v %v", again, err)
	}
	second, err := renew(req(k.csr()))
	if err != nil {
		t.Fatal(err)
	}
	if n := k.count(`SELECT count(*) FROM recovery.serial WHERE serial = $1 AND state = 'superseded' AND ready_at IS NULL`,
		first.Serial.Serial); n != 1 {
		t.Fatal("the one before was not superseded")
	}
	_, err = renew(req(csr)) // superseded by now: another key
	k.refused(err, commonv1.Reason_REASON_CSR_REFUSED)
	other := req(k.csr())
	other.SessionId = ids.New()
	_, err = renew(other)
	k.refused(err, commonv1.Reason_REASON_SESSION_SUPERSEDED)
	wrong := req(k.csr())
	wrong.Serial = second.Serial.Serial
	_, err = renew(wrong)
	k.refused(err, commonv1.Reason_REASON_SERIAL_UNKNOWN)
	k.exec(`UPDATE recovery.identity SET state = 'held'`)
	_, err = renew(req(k.csr()))
	k.refused(err, commonv1.Reason_REASON_IDENTITY_HELD)
	k.exec(`UPDATE recovery.identity SET state = 'fenced'`)
	_, err = renew(req(k.csr()))
	k.refused(err, commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED)
	k.exec(`UPDATE recovery.identity SET state = 'active'`)
	late := k.csr()
	third, err := renew(req(late))
	if err != nil {
		t.Fatal(err)
	}
	testkit.SetClockOffset(k.db, 5*time.Hour)
	_, err = renew(req(late)) // less than half its life is left
	k.refused(err, commonv1.Reason_REASON_CSR_REFUSED)
	if leaf := k.leaf(third.ChainPEM); pki.SerialString(leaf.SerialNumber) != third.Serial.Serial {
		t.Fatal("another serial than the chain's")
	}
}
