package identity_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/identity"
	"github.com/gpuaas/mesh/services/recovery/identity/joinkeys"
	"github.com/gpuaas/mesh/services/recovery/keys"
)

func newPrivate(tb testing.TB) ed25519.PrivateKey {
	tb.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return private
}

// replica is another replica of recovery on the bench's database, with keys of its own.
func (b *bench) replica(name string, privates ...ed25519.PrivateKey) *bench {
	b.t.Helper()
	keys, err := joinstate.NewKeys(privates...)
	if err != nil {
		b.t.Fatal(err)
	}
	other := *b
	other.keys = keys
	other.identities, err = identity.New(identity.Deps{
		Logger: testkit.Logger(b.t), Pool: b.pool, Keys: keys, Notices: b.notices, Replica: name,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return &other
}

// Scenario: replica A signs with key 2 already, replica B knows key 1 alone. An agent that A admitted opens at B.
func TestAStateOfAnUnknownKeyWaitsAndHoldsNoNode(t *testing.T) {
	b := newBench(t)
	first, second := newPrivate(t), newPrivate(t)
	ahead, behind := b.replica("replica-a", first, second), b.replica("replica-b", first)
	n := b.enrolled("one")
	ahead.admit(n)
	o := behind.hello(n)
	got := behind.open(o)
	denial := got.GetDenial()
	if got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_DENIED ||
		denial.GetReason() != commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN ||
		denial.GetAction() != commonv1.Action_ACTION_WAIT ||
		denial.GetRetryAfter().AsDuration() <= 0 {
		t.Fatalf("a state of a key that this replica lacks: %v", got)
	}
	if r := b.get(n); r.State != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE || r.Alarm != "" {
		t.Fatalf("the node: %+v", r)
	}
	key, err := joinstate.KeyID(n.joinState)
	if err != nil {
		t.Fatal(err)
	}
	incident := b.text(`SELECT severity || ' ' || summary || ' ' || next_action || ' ' || array_to_string(node_ids, ',')
		FROM recovery.incident WHERE kind = 'signing_keys' AND closed_at IS NULL`)
	for _, want := range []string{key, "replica-b", "join_state_keys", n.id} {
		if !strings.Contains(incident, want) {
			t.Errorf("the incident names no %q: %s", want, incident)
		}
	}
	// The incident is counted, and no second one is opened.
	behind.open(behind.hello(n))
	if got := b.text(`SELECT count(*)::text FROM recovery.incident WHERE kind = 'signing_keys'`); got != "1" {
		t.Errorf("incidents: %s", got)
	}
	// The replica reads key 2, and the node is admitted.
	behind = b.replica("replica-b", first, second)
	behind.admit(n)
	// Without further evidence the incident ends.
	testkit.SetClockOffset(b.db, 11*time.Minute)
	if closed, err := keys.Sweep(b.ctx, b.pool); err != nil || !closed {
		t.Fatalf("the incident was not closed: %v, %v", closed, err)
	}
	if got := b.text(`SELECT count(*) FILTER (WHERE closed_at IS NULL) || ' ' || min(closed_by)
		FROM recovery.incident`); got != "0 recovery" {
		t.Errorf("incidents: %s", got)
	}
}

// Scenario: the key is lost for good, and the node was enrolled anew. The join state that it still has is of its former
// enrolment.
func TestAStateOfALostKeyDoesNotShutANewEnrolmentOut(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	lost := n.joinState
	after := b.replica("replica-b", newPrivate(t))
	n.instance, n.serial = ids.New(), fmt.Sprintf("%x", []byte(ids.New()[24:]))
	b.tx(func(tx pgx.Tx) error {
		r, err := identity.LockOne(b.ctx, tx, n.id)
		if err != nil {
			return err
		}
		m, err := identity.ReadMoment(b.ctx, tx)
		if err != nil {
			return err
		}
		if err := identity.Activate(b.ctx, tx, r, n.instance, certificate(n.serial), "test", "enrolled", m); err != nil {
			return err
		}
		_, err = identity.Save(b.ctx, tx, r)
		return err
	})
	n.joinState = lost
	after.admit(n)
}

// A node needs the keys that have signed the join states that it may have, and no others.
func TestAKeyIsNeededByTheNodesThatHoldItsStates(t *testing.T) {
	b := newBench(t)
	first, second := newPrivate(t), newPrivate(t)
	one, two := b.enrolled("one"), b.enrolled("two")
	old := b.replica("replica", first)
	old.admit(one)
	old.admit(two)
	need := func(key, want string) {
		t.Helper()
		if got, err := joinkeys.Outstanding(b.ctx, b.pool,
			keyset.Key{KeyID: key, EndorsedBy: "another", MadeAt: time.Now()}); err != nil || got != want {
			t.Errorf("key %s is needed by %q, %v; want %q", key, got, err, want)
		}
	}
	firstID, both := old.keys.SigningID(), b.replica("replica", first, second)
	need(firstID, "join states of nodes: one, two")
	// The node was welcomed and is not ready, so it may have a state of either key.
	o := both.hello(one)
	opened := both.open(o)
	need(firstID, "join states of nodes: one, two")
	need(both.keys.SigningID(), "join states of nodes: one")
	// If the same session is requested again, a replica that still signs with the other key returns the same bytes.
	if again := b.replica("behind", second, first).open(o); string(again.GetJoinState()) != string(opened.GetJoinState()) {
		t.Error("asked again: another join state")
	}
	both.confirm(o, opened.GetGeneration())
	need(firstID, "join states of nodes: two")
	// A state that was issued before keys were recorded may be signed by any of the first keys.
	if _, err := b.db.OwnerPool().Exec(b.ctx,
		`UPDATE recovery.identity SET join_keys = '{}' WHERE name = 'one'`); err != nil {
		t.Fatal(err)
	}
	if got, err := joinkeys.Outstanding(b.ctx, b.pool, keyset.Key{KeyID: firstID, MadeAt: time.Now()}); err != nil ||
		got != "join states of nodes: one, two" {
		t.Errorf("%q, %v", got, err)
	}

	// After a restore the database has lost which keys signed the nodes' join states: each key from before it is needed by
	// each node that has confirmed nothing since, and a key that was made after it by none of those.
	if _, err := b.db.OwnerPool().Exec(b.ctx,
		`UPDATE recovery.identity SET join_keys = ARRAY['another']; UPDATE mesh.era
			SET era = 1, raised_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	after := func(key keyset.Key, want string) {
		t.Helper()
		key.KeyID, key.EndorsedBy = "lost", "another"
		if got, err := joinkeys.Outstanding(b.ctx, b.pool, key); err != nil || got != want {
			t.Errorf("after the restore %+v is needed by %q, %v; want %q", key, got, err, want)
		}
	}
	after(keyset.Key{MadeAt: time.Now().Add(-time.Hour)}, "join states of nodes: one, two")
	after(keyset.Key{MadeAt: time.Now().Add(time.Hour), Returned: true}, "join states of nodes: one, two")
	after(keyset.Key{MadeAt: time.Now().Add(time.Hour)}, "")
	one.joinState = opened.GetJoinState()
	both.admit(one)
	after(keyset.Key{MadeAt: time.Now().Add(-time.Hour)}, "join states of nodes: two")
}

// A state with a wrong signature under a known key counts as lost: the node is challenged.
func TestGarbageUnderAKnownKeyIsStillChallenged(t *testing.T) {
	b := newBench(t)
	n := b.enrolled("one")
	b.admit(n)
	good := n.joinState
	for name, bad := range map[string][]byte{
		"bad signature": append(append([]byte(nil), good[:len(good)-1]...), good[len(good)-1]^1),
		"bad format":    good[1:],
	} {
		n.joinState = bad
		if got := b.open(b.hello(n)); got.GetVerdict() != recoveryv1.OpenVerdict_OPEN_VERDICT_CHALLENGE {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := b.text(`SELECT count(*)::text FROM recovery.incident`); got != "0" {
		t.Errorf("incidents: %s", got)
	}
}
