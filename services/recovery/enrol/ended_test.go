package enrol_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// identities decides about the sessions of the kit's nodes.
func (k *kit) identities() *identity.Identities {
	k.t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		k.t.Fatal(err)
	}
	keys, err := joinstate.NewKeys(private)
	if err != nil {
		k.t.Fatal(err)
	}
	out, err := identity.New(identity.Deps{Logger: testkit.Logger(k.t), Pool: k.pool, Keys: keys})
	if err != nil {
		k.t.Fatal(err)
	}
	return out
}

// TestAnEndedInstanceIsRefused checks the reason with which a retired instance that wakes is refused: its epoch has
// ended, or a later one has its workspace.
func TestAnEndedInstanceIsRefused(t *testing.T) {
	k := newKit(t)
	ws := ids.New()
	b := k.prepare(ws, 1)
	enrolled := k.mustEnroll(b.secret, k.csr())
	err := k.instances.Retire(k.ctx,
		&recoveryv1.RetireInstanceRequest{InstanceId: b.instance, WorkspaceId: ws, Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	sessions := k.identities()
	refusedWith := func(want commonv1.Reason) {
		t.Helper()
		res, _, err := sessions.Open(k.ctx, []*recoveryv1.OpenSession{{
			SessionId: ids.New(), NodeId: b.node, NodeInstanceId: enrolled.GetNodeInstanceId(), Serial: k.serialOf(enrolled),
			RemoteAddress: "192.0.2.7:1",
		}})
		if err != nil {
			t.Fatal(err)
		}
		if got := res[0].GetDenial(); got.GetReason() != want || got.GetAction() != commonv1.Action_ACTION_STOP {
			t.Errorf("told %v, action %v; want %v, stop", got.GetReason(), got.GetAction(), want)
		}
	}
	refusedWith(commonv1.Reason_REASON_EPOCH_ENDED)
	k.prepare(ws, 2)
	refusedWith(commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	// However often it connects, it is reported once in five minutes, with its address.
	reports := func() []*recoveryv1.InstanceRefused {
		t.Helper()
		var out []*recoveryv1.InstanceRefused
		for _, e := range testkit.Events(t, k.pool, `kind = 'instance.refused' AND aggregate_id = $1`, b.instance) {
			refused := &recoveryv1.InstanceRefused{}
			if err := e.Decode(refused); err != nil {
				t.Fatal(err)
			}
			out = append(out, refused)
		}
		return out
	}
	got := reports()
	if len(got) != 1 || got[0].GetReason() != commonv1.Reason_REASON_EPOCH_ENDED ||
		got[0].GetRemoteAddress() != "192.0.2.7:1" || got[0].GetEpoch() != 1 ||
		got[0].GetWorkspaceId() != ws || got[0].GetNodeId() != b.node || got[0].GetRefusedAt().AsTime().IsZero() {
		t.Fatalf("reported as %v", got)
	}
	testkit.SetClockOffset(k.db, 6*time.Minute)
	refusedWith(commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	_, err = k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	if got = reports(); len(got) != 2 || got[1].GetReason() != commonv1.Reason_REASON_EPOCH_SUPERSEDED ||
		got[1].GetVersion() != 2 {
		t.Fatalf("reported as %v", got)
	}
	// An instance that only requests a certificate is reported as well.
	testkit.SetClockOffset(k.db, 12*time.Minute)
	_, err = k.enroll(b.secret, k.csr())
	k.refused(err, commonv1.Reason_REASON_EPOCH_SUPERSEDED)
	if got = reports(); len(got) != 3 {
		t.Fatalf("%d reports after a certificate was asked for", len(got))
	}
}

// TestARetiredMachineIsNoEndedInstance: an identity that a person retired is refused as identity_retired, and no event
// is appended.
func TestARetiredMachineIsNoEndedInstance(t *testing.T) {
	k := newKit(t)
	bundle := k.bootstrap("m1")
	enrolled := k.mustEnroll(bundle.Token, k.csr())
	sessions := k.identities()
	_, _, err := sessions.Change(k.ctx, enrolled.GetNodeId(), recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE, "sold",
		identity.Actor{Subject: "ada"})
	if err != nil {
		t.Fatal(err)
	}
	res, _, err := sessions.Open(k.ctx, []*recoveryv1.OpenSession{{
		SessionId: ids.New(), NodeId: enrolled.GetNodeId(), NodeInstanceId: enrolled.GetNodeInstanceId(),
		Serial: k.serialOf(enrolled),
	}})
	if err != nil {
		t.Fatal(err)
	}
	if got := res[0].GetDenial().GetReason(); got != commonv1.Reason_REASON_IDENTITY_RETIRED {
		t.Errorf("told %v", got)
	}
	if n := k.count(`SELECT count(*) FROM events.event WHERE kind = 'instance.refused'`); n != 0 {
		t.Errorf("%d reports", n)
	}
}
