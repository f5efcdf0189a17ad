package enrol_test

import (
	"crypto"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/recoverykey"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/enrol"
)

const tokenMissing = commonv1.Reason_REASON_RECOVERY_TOKEN_MISSING

// claimOf returns the claim that a node has no token, signed by a key.
func (k *kit) claimOf(node, serial string, key crypto.Signer) *recoveryv1.TokenMissing {
	k.t.Helper()
	public, err := recoverykey.Public(key)
	if err != nil {
		k.t.Fatal(err)
	}
	proof, err := recoverykey.SignMissing(key, node, serial)
	if err != nil {
		k.t.Fatal(err)
	}
	return &recoveryv1.TokenMissing{NodeId: node, Serial: serial, PublicKey: public, Proof: proof}
}

// reports sends a claim and wants it refused for a reason.
func (k *kit) reports(claim *recoveryv1.TokenMissing, want commonv1.Reason) error {
	k.t.Helper()
	_, err := k.enroller.Enroll(k.ctx, "192.0.2.7",
		&recoveryv1.EnrollRequest{TokenMissing: claim, CorrelationId: "attempt-0007"})
	k.refused(err, want)
	return err
}

// noted returns how many events there are that a node has no token, proven or not.
func (k *kit) noted(node string, unverified bool) int {
	k.t.Helper()
	name := node + "/recovery_token_missing"
	if unverified {
		name += " (unverified)"
	}
	return k.count(`SELECT count(*) FROM events.event WHERE kind = 'enrollment.attempted' AND aggregate_id = $1
		AND correlation_id = 'attempt-0007'`, name)
}

// certified returns a machine that was admitted on a certificate, with the key of that.
func (k *kit) certified(name string) (*machine, crypto.Signer) {
	k.t.Helper()
	m := k.machine()
	key, csr := k.key()
	m.took(m.mustEnroll(k.bootstrap(name).Token, csr))
	m.admit()
	return m, key
}

// TestAHostWithoutATokenIsRefusedAndHeard: the key of its expired certificate proves which node it is. Nothing of the
// node changes.
func TestAHostWithoutATokenIsRefusedAndHeard(t *testing.T) {
	k := newKit(t)
	m, key := k.certified("node-1")
	testkit.SetClockOffset(k.db, 25*time.Hour)
	before := k.rows()
	claim := k.claimOf(m.node, m.serial, key)
	for range 3 {
		if err := k.reports(claim, tokenMissing); fault.ActionOf(err) != commonv1.Action_ACTION_REBUNDLE ||
			!strings.Contains(fault.From(err).Remedy, "gpuaas nodes bundle") {
			t.Errorf("refused with %+v", err)
		}
	}
	if n, other := k.noted(m.node, false), k.noted(m.node, true); n != 1 || other != 0 {
		t.Errorf("%d events, and %d unverified", n, other)
	}
	if k.rows() != before {
		t.Error("a claim has changed rows of nodes, tokens or enrolments")
	}
	// Once the node has another certificate, the claim of before proves nothing.
	testkit.SetClockOffset(k.db, 0)
	m.mustRecover(k.csr())
	m.admit()
	testkit.SetClockOffset(k.db, 50*time.Hour)
	lost := k.claimOf(m.node, claim.GetSerial(), key)
	_ = k.reports(lost, tokenMissing)
	if n, other := k.noted(m.node, false), k.noted(m.node, true); n != 1 || other != 1 {
		t.Errorf("after a recovery: %d events, and %d unverified", n, other)
	}
}

// TestAForgedClaimIsNoEvidence holds of each claim that is not proven: it gets the same answer, and an event that is
// marked as unverified, at most one in a minute; none for a node that does not exist. It hides no claim that is proven.
func TestAForgedClaimIsNoEvidence(t *testing.T) {
	k := newKit(t)
	m, key := k.certified("node-1")
	other, otherKey := k.certified("node-2")
	stranger, _ := k.key()
	testkit.SetClockOffset(k.db, 25*time.Hour)
	fresh := k.machine()
	freshKey, csr := k.key()
	fresh.took(fresh.mustEnroll(k.bootstrap("node-3").Token, csr))
	fresh.admit()
	altered := func(change func(*recoveryv1.TokenMissing)) *recoveryv1.TokenMissing {
		claim := k.claimOf(m.node, m.serial, key)
		change(claim)
		return claim
	}
	forged := map[string]*recoveryv1.TokenMissing{
		"another key":                  k.claimOf(m.node, m.serial, stranger),
		"another node's certificate":   k.claimOf(m.node, other.serial, otherKey),
		"another node's key":           k.claimOf(m.node, m.serial, otherKey),
		"the recovery key":             k.claimOf(m.node, m.serial, m.key),
		"a serial that was not issued": k.claimOf(m.node, "4711", key),
		"no proof":                     altered(func(c *recoveryv1.TokenMissing) { c.Proof = nil }),
		"no key":                       altered(func(c *recoveryv1.TokenMissing) { c.PublicKey = nil }),
		"the proof of another node": altered(func(c *recoveryv1.TokenMissing) {
			c.Proof = k.claimOf(other.node, m.serial, key).GetProof()
		}),
		"a certificate that is in time": k.claimOf(fresh.node, fresh.serial, freshKey),
		"no such node":                  k.claimOf(ids.New(), m.serial, key),
	}
	for name, claim := range forged {
		before := k.rows()
		_ = k.reports(claim, tokenMissing)
		if k.rows() != before {
			t.Errorf("%s: rows have changed", name)
		}
	}
	for _, one := range []*machine{m, fresh} {
		if n, unverified := k.noted(one.node, false), k.noted(one.node, true); n != 0 || unverified != 1 {
			t.Errorf("%d events, and %d unverified", n, unverified)
		}
	}
	_ = k.reports(k.claimOf(m.node, m.serial, key), tokenMissing)
	if n := k.noted(m.node, false); n != 1 {
		t.Errorf("%d events of the claim that is proven", n)
	}
	if n := k.count(`SELECT count(*) FROM events.event WHERE kind = 'enrollment.attempted'
		AND aggregate_id LIKE '%recovery_token_missing%'`); n != 3 {
		t.Errorf("%d events of claims", n)
	}
	// A request without a token that claims nothing has a bad token.
	_, err := k.enroll("", k.csr())
	k.refused(err, commonv1.Reason_REASON_TOKEN_INVALID)
}

// TestClaimsAreLimited checks that the claims of each node are limited, and apart from them all claims that are not
// proven.
func TestClaimsAreLimited(t *testing.T) {
	k := newKit(t)
	m, key := k.certified("node-1")
	stranger, _ := k.key()
	testkit.SetClockOffset(k.db, 25*time.Hour)
	tight, err := enrol.New(enrol.Deps{
		Logger: testkit.Logger(t), Pool: k.pool, Signer: k.ca, Policy: k.policy, Profiles: twoProfiles{},
		TaskKeys: func() (string, error) { return "k:AAAA", nil }, JoinStates: k.keys,
	}, enrol.Config{TrustDomain: "mesh.test", PerToken: 0.001, PerTokenBurst: 2})
	if err != nil {
		t.Fatal(err)
	}
	k.enroller = tight
	for _, signer := range []crypto.Signer{stranger, key} {
		for range 2 {
			_ = k.reports(k.claimOf(m.node, m.serial, signer), tokenMissing)
		}
		_ = k.reports(k.claimOf(m.node, m.serial, signer), commonv1.Reason_REASON_RATE_LIMITED)
	}
	// Claims that are not proven share a limit, which other keys, proofs and nodes are no way around.
	another, _ := k.key()
	_ = k.reports(k.claimOf(ids.New(), m.serial, another), commonv1.Reason_REASON_RATE_LIMITED)
}
