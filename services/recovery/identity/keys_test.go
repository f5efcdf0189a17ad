package identity_test

import (
	"crypto/rand"
	"encoding/hex"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// keyOf returns the hash of the key for which a serial was issued.
func (b *bench) keyOf(serial string) []byte {
	b.t.Helper()
	var key []byte
	if err := b.pool.QueryRow(b.ctx, `SELECT csr_key_sha256 FROM recovery.serial WHERE serial = $1`,
		serial).Scan(&key); err != nil {
		b.t.Fatal(err)
	}
	return key
}

func (b *bench) helloWith(n *node, key []byte) *recoveryv1.OpenSession {
	o := b.hello(n)
	o.KeySha256 = key
	return o
}

func otherKey() []byte {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	return key
}

// TestAnIssuedSerialWithAnotherKeyIsRefused opens with the serial in use, and a key that it was not issued for: it is
// refused, the node's own session and generation stay as they are, and there is evidence.
func TestAnIssuedSerialWithAnotherKeyIsRefused(t *testing.T) {
	b := newBench(t)
	log, err := audit.New(audit.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Schema: "recovery", Policy: policy.Fixed{},
		Wake: &events.Signal{},
	})
	if err != nil {
		t.Fatal(err)
	}
	b.identities, err = identity.New(identity.Deps{
		Logger: testkit.Logger(t), Pool: b.pool, Keys: b.keys, Notices: b.notices,
		Audit: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	n := b.enrolled("one")
	b.admit(n)
	before := b.get(n)
	forged := b.helloWith(n, otherKey())
	for range 2 {
		got := b.open(forged)
		if got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED ||
			got.GetDenial().GetReason() != commonv1.Reason_REASON_SERIAL_UNKNOWN {
			t.Fatalf("another key: %v", got)
		}
	}
	if after := b.get(n); after.Issued != before.Issued || after.State != before.State ||
		after.ConfirmedSession != before.ConfirmedSession {
		t.Errorf("the node is %+v, was %+v", after, before)
	}
	var entries int
	err = b.pool.QueryRow(b.ctx, `SELECT count(*) FROM events.event
		WHERE kind = $1 AND payload->>'action' = 'session.open' AND payload->>'outcome' = $2
		AND payload->'details'->>'evidence' = 'forged_certificate' AND payload->'details'->>'key_fingerprint' = $3`,
		audit.Kind, audit.Refused, hex.EncodeToString(forged.GetKeySha256())).Scan(&entries)
	if err != nil {
		t.Fatal(err)
	}
	if entries != 1 {
		t.Errorf("%d entries of evidence", entries)
	}
	for what, key := range map[string][]byte{"the issued key": b.keyOf(n.serial), "a replica that tells none": nil} {
		if got := b.open(b.helloWith(n, key)); got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_WELCOME {
			t.Errorf("%s: %v", what, got)
		}
	}
}

// TestAnAdoptedCertificateIsKnownByItsKey takes over a certificate whose row a restore has lost: from then on it is
// that key's.
func TestAnAdoptedCertificateIsKnownByItsKey(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	ahead, err := b.keys.Sign(joinstate.State{
		NodeID: n.id, NodeInstanceID: n.instance, Generation: 41, Serial: "abcd",
		Era: 0,
	})
	if err != nil {
		t.Fatal(err)
	}
	n.joinState, n.serial = ahead, "abcd" // issued in the lost history
	key := otherKey()
	if got := b.open(b.helloWith(n, key)); got.GetGeneration() != 42 {
		t.Fatalf("ahead of the database: %v", got)
	}
	if got := b.keyOf(n.serial); string(got) != string(key) {
		t.Errorf("it is known by the key %x, want %x", got, key)
	}
	// The node's join state has set rollback mode: until a person accepts that, no node is told to take another identity.
	wantWait(t, "another key", b.open(b.helloWith(n, otherKey())).GetDenial())
	b.accept(t)
	if got := b.open(b.helloWith(n, otherKey())); got.GetDenial().GetReason() != commonv1.Reason_REASON_SERIAL_UNKNOWN {
		t.Errorf("another key: %v", got)
	}
}
