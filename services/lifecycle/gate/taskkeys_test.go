package gate_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// lives registers a replica of nodeapi that beats.
func (k *kit) lives() string {
	k.t.Helper()
	id := ids.New()
	testkit.Beat(k.db, id, "", 0, false)
	return id
}

func (k *kit) lacking(key string) string {
	k.t.Helper()
	text, err := gate.Distributed(k.ctx, k.pool, key, false)
	if err != nil {
		k.t.Fatal(err)
	}
	return text
}

func (k *kit) mayLease(node string, generation int64, key string) error {
	k.t.Helper()
	var refused error
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		work, err := gate.LockForWork(ctx, tx, []string{node})
		if err == nil {
			refused = work[node].MayLease(generation, key)
		}
		return err
	})
	return refused
}

// TestAKeyWaitsForTheAgentsThatMustStoreIt follows a new key over nodes that hold it, lack it, are away, are shut, are
// retired, and over agents of an earlier build.
func TestAKeyWaitsForTheAgentsThatMustStoreIt(t *testing.T) {
	k := newKit(t)
	named := func(name string) string {
		id := ids.New()
		if _, err := k.server.ApplyFence(k.ctx,
			&lifecyclev1.ApplyFenceRequest{NodeId: id, FenceEpoch: 1, Admitted: true, Name: name}); err != nil {
			t.Fatal(err)
		}
		return id
	}
	living := k.lives()
	at := func(replica, node string, generation int64, keys ...string) *lifecyclev1.SessionReady {
		s := session(node, node, generation)
		s.TaskKeyIds = keys
		for _, r := range k.ready(replica, s) {
			if !r.GetAccepted() {
				t.Fatalf("refused: %v", r.GetDenial())
			}
		}
		return s
	}
	open := func(node string, generation int64, keys ...string) *lifecyclev1.SessionReady {
		return at(living, node, generation, keys...)
	}
	ready, lacks, away, shut, lost := named("holds"), named("lacks"), named("away"), named("shut"), named("lost")
	at(ids.New(), lost, 1, "k1") // its replica was killed: no event reports the end of its session
	open(ready, 1, "k1", "k2")
	standing := open(lacks, 1, "k1")
	k.closed(away, open(away, 1, "k1").GetSessionId(), commonv1.SessionState_SESSION_STATE_CLOSED)
	open(shut, 1, "k1")
	k.fence(shut, 2, false)
	if got, want := k.lacking("k2"), "agents that have not stored it: lacks"; got != want {
		t.Errorf("lacking: %q, want %q", got, want)
	}
	if err := k.mayLease(lacks, 1, "k1"); err != nil {
		t.Errorf("a lease under the key that is held: %v", err)
	}
	if err := k.mayLease(lacks, 1, "k2"); !fault.Has(err, commonv1.Reason_REASON_TASK_KEY_NOT_HELD) {
		t.Errorf("a lease under a key that is not held: %v", err)
	}

	// The report of an earlier session changes nothing.
	report := func(node, session string, keys ...string) []string {
		res, err := k.server.KeysHeld(k.ctx,
			&lifecyclev1.KeysHeldRequest{Sessions: []*lifecyclev1.SessionKeys{{NodeId: node, SessionId: session, KeyIds: keys}}})
		if err != nil {
			t.Fatal(err)
		}
		return res.GetSessionIds()
	}
	if taken := report(lacks, ids.New(), "k1", "k2"); len(taken) > 0 || k.lacking("k2") == "" {
		t.Errorf("a report of another session was taken: %q", taken)
	}
	if taken := report(lacks, standing.GetSessionId(), "k1", "k2"); !slices.Equal(taken,
		[]string{standing.GetSessionId()}) {
		t.Errorf("taken: %q", taken)
	}
	if got := k.lacking("k2"); got != "" {
		t.Errorf("lacking after the report: %q", got)
	}
	if err := k.mayLease(lacks, 1, "k2"); err != nil {
		t.Errorf("a lease after the report: %v", err)
	}

	// Agents of an earlier build are named with the remedy, also while they are on hold; they go on with the keys that
	// they have.
	for i := range 7 {
		open(named(fmt.Sprintf("old-%d", i)), 1)
	}
	held := named("old-held")
	open(held, 1)
	if _, err := k.server.ApplyFence(k.ctx,
		&lifecyclev1.ApplyFenceRequest{NodeId: held, FenceEpoch: 2, Name: "old-held"}); err != nil {
		t.Fatal(err)
	}
	open(away, 2, "k1")
	const want = "agents that have not stored it: away; agents that do not report their keys, because they are of an " +
		"earlier build or have not connected yet: old-0, old-1, old-2, old-3, old-4 and 3 more; update the agent, start " +
		"it, or retire the node"
	if got := k.lacking("k2"); got != want {
		t.Errorf("lacking:\n%q\nwant\n%q", got, want)
	}
	// A key that returned from its file after a restore does not wait for those that report none: some have gone since the
	// backup.
	if got, err := gate.Distributed(k.ctx, k.pool, "k2", true); err != nil ||
		got != "agents that have not stored it: away" {
		t.Errorf("lacking a key that returned: %q, %v", got, err)
	}
	old := named("old")
	open(old, 1)
	if err := k.mayLease(old, 1, "k1"); err != nil {
		t.Errorf("a lease to an agent of an earlier build: %v", err)
	}
	// A node that was updated reports, one that went back to the earlier build does not.
	open(old, 2, "k1", "k2")
	open(old, 3)
	if g := k.get(old); g.SessionEpoch != 3 || k.mayLease(old, 3, "k9") != nil {
		t.Errorf("after the agent went back: %+v", g)
	}
	// So does one whose gate was raised by a replica of lifecycle of a build that knows nothing of the keys: what was
	// reported before stays in its row.
	open(old, 4, "k1", "k2")
	before := k.lacking("k2")
	if _, err := k.db.OwnerPool().Exec(k.ctx,
		`UPDATE lifecycle.node_gate SET session_epoch = 5, session_id = $2 WHERE node_id = $1`, old, ids.New()); err != nil {
		t.Fatal(err)
	}
	if got := k.lacking("k2"); got == before {
		t.Errorf("a report of an earlier session counts: %q", got)
	}
	if err := k.mayLease(old, 5, "k9"); err != nil {
		t.Errorf("a lease to an agent whose keys are not known: %v", err)
	}
}
