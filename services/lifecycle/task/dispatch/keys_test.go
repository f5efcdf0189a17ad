package dispatch_test

import (
	"crypto/ed25519"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

func (k *kit) needs(key envelope.Key, first bool) string {
	k.t.Helper()
	row := keyset.Key{KeyID: key.ID(), EndorsedBy: "another", MadeAt: time.Now()}
	if first {
		row.EndorsedBy = ""
	}
	text, err := task.NeedKey(k.t.Context(), k.pool, row)
	if err != nil {
		k.t.Fatal(err)
	}
	return text
}

// TestATaskKeepsTheKeyOfItsAttempt rotates the key between an offer and its repetition: the repetition is signed as the
// offer was, the former key is needed until the task has ended, and a node that lacks the new key waits for its next
// task.
func TestATaskKeepsTheKeyOfItsAttempt(t *testing.T) {
	k := newKit(t)
	first, second := private(t), private(t)
	old, next := envelope.NewKey(first), envelope.NewKey(second)
	confirmed := error(nil)
	ring := &envelope.Ring{}
	rotate := func(signing ed25519.PrivateKey) {
		ring.Replace(envelope.RingState{
			Signing: envelope.NewKey(signing), Former: map[string]ed25519.PrivateKey{old.ID(): first, next.ID(): second},
			Confirmed: func() error { return confirmed },
		})
	}
	rotate(first)
	k.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Keys: ring, Hub: k.hub,
		Committed: func() {},
	})
	public, err := k.keys.Public()
	if err != nil {
		t.Fatal(err)
	}
	joins, err := joinstate.NewVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	k.gates = gate.NewServer(gate.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Join: joins, Tasks: k.tasks, Instances: noInstance{}, Committed: func() {},
		Slots: 1,
	})
	n := k.node()
	raise := func(keys ...string) {
		n.generation++
		n.session = ids.New()
		s := k.sessionReady(n)
		s.TaskKeyIds = keys
		res, err := k.gates.SessionsReady(t.Context(),
			&lifecyclev1.SessionsReadyRequest{ReplicaId: ids.New(), Sessions: []*lifecyclev1.SessionReady{s}})
		if err != nil || !res.GetResults()[0].GetAccepted() {
			t.Fatalf("%v, %v", res, err)
		}
	}
	raise(old.ID())
	row := k.enqueue(n)
	if got := k.needs(old, true); got != "" {
		t.Errorf("a task that waits needs %q", got)
	}
	ref := k.lease(n)
	if got, want := k.needs(old, false), "tasks under way on nodes: n"; got != want {
		t.Errorf("the key of an offer is needed by %q, want %q", got, want)
	}
	if got := k.needs(next, false); got != "" {
		t.Errorf("the next key is needed by %q", got)
	}

	// The next key signs, and the agent has stored it: what is offered again keeps the key of its offer.
	rotate(second)
	held, err := k.gates.KeysHeld(t.Context(), &lifecyclev1.KeysHeldRequest{
		Sessions: []*lifecyclev1.SessionKeys{{NodeId: n.id, SessionId: n.session, KeyIds: []string{old.ID(), next.ID()}}},
	})
	if err != nil || len(held.GetSessionIds()) != 1 {
		t.Fatalf("%v, %v", held, err)
	}
	testkit.SetClockOffset(k.db, 3*time.Second)
	again := k.leaseOf(n)
	if len(again.GetTasks()) != 1 || again.GetTasks()[0].GetOffer().GetKeyId() != old.ID() {
		t.Fatalf("offered again: %v", again)
	}
	// A replica without the file of the former key leaves the tasks that this key signed to other replicas, and leases the
	// rest.
	ring.Replace(envelope.RingState{Signing: next})
	other := k.enqueue(n)
	testkit.SetClockOffset(k.db, 6*time.Second)
	got := k.leaseOf(n).GetTasks()
	if len(got) != 1 || got[0].GetTask().GetTaskId() != other.TaskID || got[0].GetOffer().GetKeyId() != next.ID() {
		t.Fatalf("a replica without the former key offers %v", got)
	}
	k.delivered(n, got[0].GetTask())
	k.started(n, got[0].GetTask())
	k.result(n, got[0].GetTask(), commonv1.TaskState_TASK_STATE_SUCCEEDED)
	rotate(second)
	k.delivered(n, ref)
	k.started(n, ref)
	if got := k.needs(old, false); got == "" {
		t.Error("a task that runs does not need its key")
	}
	k.result(n, ref, commonv1.TaskState_TASK_STATE_SUCCEEDED)
	k.wants(row.TaskID, commonv1.TaskState_TASK_STATE_SUCCEEDED, 1, 0)
	if got := k.needs(old, true); got != "" {
		t.Errorf("after the end it is needed by %q", got)
	}

	// A session without the key that signs waits, and its refusal names the key; the task does not fail.
	raise(old.ID())
	waiting := k.enqueue(n)
	res := k.leaseOf(n)
	if len(res.GetTasks()) != 0 || len(res.GetRefused()) != 1 {
		t.Fatalf("leased without the key: %v", res)
	}
	denial := res.GetRefused()[0].GetDenial()
	if denial.GetReason() != commonv1.Reason_REASON_TASK_KEY_NOT_HELD ||
		denial.GetAction() != commonv1.Action_ACTION_WAIT || denial.GetRetryAfter().AsDuration() <= 0 {
		t.Errorf("refused: %v", denial)
	}
	k.wants(waiting.TaskID, commonv1.TaskState_TASK_STATE_QUEUED, 0, 0)
	raise(old.ID(), next.ID())
	if got := k.leaseOf(n); len(got.GetTasks()) != 1 || got.GetTasks()[0].GetOffer().GetKeyId() != next.ID() {
		t.Errorf("leased with the key: %v", got)
	}

	// A replica that does not know whether its key still signs leases nothing.
	confirmed = fault.New(commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED, "")
	third := k.enqueue(n)
	_, err = k.tasks.LeaseTasks(t.Context(), &lifecyclev1.LeaseTasksRequest{
		Nodes: []*lifecyclev1.NodeLease{{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 32}},
	})
	if !fault.Has(err, commonv1.Reason_REASON_SIGNING_KEY_UNCONFIRMED) {
		t.Errorf("a lease under a key that is not confirmed: %v", err)
	}
	k.wants(third.TaskID, commonv1.TaskState_TASK_STATE_QUEUED, 0, 0)
}

// TestAKeyFromBeforeARestoreIsNeededByWhoHasNotConnectedSince: the database has lost which attempts a node was offered,
// and adopts them by their envelopes.
func TestAKeyFromBeforeARestoreIsNeededByWhoHasNotConnectedSince(t *testing.T) {
	k := newKit(t)
	n := k.node()
	need := func(what string, key keyset.Key, want string) {
		t.Helper()
		key.KeyID, key.EndorsedBy = "k", "another"
		if got, err := task.NeedKey(t.Context(), k.pool, key); err != nil || got != want {
			t.Errorf("%s: the key is needed by %q, %v; want %q", what, got, err, want)
		}
	}
	before, after := keyset.Key{MadeAt: time.Now().Add(-time.Hour)}, keyset.Key{MadeAt: time.Now().Add(time.Hour)}
	returned := after
	returned.Returned = true
	need("without a restore", before, "")
	if _, err := k.db.OwnerPool().Exec(t.Context(),
		`UPDATE mesh.era SET era = 1, raised_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	const away = "tasks under way on nodes: n"
	need("made before the restore", before, away)
	need("brought back from its file", returned, away)
	need("made after the restore", after, "")
	n.generation = 1 << 40
	k.ready(n)
	need("after the node connected", before, "")
	need("after the node connected", returned, "")
}
