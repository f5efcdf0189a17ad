package gate_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

func TestTheHighestFenceWins(t *testing.T) {
	k := newKit(t)
	node := ids.New()
	for _, tc := range []struct {
		epoch    int64
		admitted bool
		kept     int64 // the fence epoch of the gate after it
		open     bool
	}{
		{2, true, 2, true},
		{1, false, 2, true}, // late: a hold that a reactivation overtook
		{2, false, 2, true}, // an equal epoch is the same decision
		{5, false, 5, false},
		{4, true, 5, false}, // late: a reactivation that a fence overtook
		{6, true, 6, true},
	} {
		res := k.fence(node, tc.epoch, tc.admitted)
		if g := k.get(node); res.GetFenceEpoch() != tc.kept || res.GetAdmitted() != tc.open || g.FenceEpoch != tc.kept ||
			g.Admitted != tc.open {
			t.Errorf("fence %d: answered %v, the gate is %d %t, want %d %t", tc.epoch, res, g.FenceEpoch, g.Admitted, tc.kept,
				tc.open)
		}
	}
	if got := k.versions(node); !slices.Equal(got, []int64{1, 2, 3}) {
		t.Errorf("told in versions %v: what changed nothing is not told", got)
	}
	res, err := k.server.ApplyFence(k.ctx,
		&lifecyclev1.ApplyFenceRequest{NodeId: node, FenceEpoch: 7, Admitted: true, Retired: true})
	if err != nil || res.GetAdmitted() || !k.get(node).Retired {
		t.Errorf("a retired node: %v, %v", res, err)
	}
	if g := k.get(node); g.Slots != 4 || g.Name != "n-"+node {
		t.Errorf("a machine has %d slots and is called %q", g.Slots, g.Name)
	}
}

func TestAFenceCarriesRefusedRegistersUnlessItIsLate(t *testing.T) {
	k := newKit(t)
	node, ws := ids.New(), ids.New()
	for _, tc := range []struct {
		fence int64
		count int32
		why   string
	}{{3, 4, "mint_consumed"}, {3, 4, "mint_consumed"}, {4, 0, ""}, {3, 5, "mint_consumed"}} {
		_, err := k.server.ApplyFence(k.ctx, &lifecyclev1.ApplyFenceRequest{
			NodeId: node, FenceEpoch: tc.fence, Admitted: true, InstanceId: ids.New(), WorkspaceId: ws, Epoch: 2,
			RegisterFailures: tc.count, RegisterError: tc.why,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if want := ws + "/2 4 mint_consumed"; !slices.Equal(k.heard.failures, []string{want, want, ws + "/2 0 "}) {
		t.Errorf("the workspace was told %q", k.heard.failures)
	}
	if g := k.get(node); g.Slots != 1 || g.WorkspaceID != ws || g.Epoch != 2 {
		t.Errorf("a box's gate: %+v", g)
	}
}

func TestOnlyTheNewestAdmittedSessionRaisesTheGate(t *testing.T) {
	k := newKit(t)
	node, instance, replica := k.node(), ids.New(), ids.New()
	denied := func(what string, r *lifecyclev1.SessionReady, want commonv1.Reason) {
		t.Helper()
		before, events := k.get(node), len(k.versions(node))
		res := k.ready(replica, r)[0]
		if res.GetAccepted() || res.GetDenial().GetReason() != want ||
			res.GetDenial().GetAction() == commonv1.Action_ACTION_UNSPECIFIED {
			t.Errorf("%s: %v, want %v", what, res, want)
		}
		if after := k.get(node); after.Version != before.Version || after.SessionID != before.SessionID ||
			len(k.versions(node)) != events {
			t.Errorf("%s: the gate changed: %+v", what, after)
		}
	}
	unknown := session(ids.New(), instance, 1)
	if res := k.ready(replica, unknown)[0]; res.GetDenial().GetReason() != commonv1.Reason_REASON_NODE_NOT_ADMITTED {
		t.Errorf("a node without a gate: %v", res)
	}
	forged := session(node, instance, 3)
	forged.JoinState = []byte("nothing")
	denied("a join state that does not verify", forged, commonv1.Reason_REASON_SESSION_UNKNOWN)
	ahead := session(node, instance, 3)
	ahead.JoinState = []byte(foreignKey)
	denied("a join state of a key that this replica lacks", ahead, commonv1.Reason_REASON_SIGNING_KEY_UNKNOWN)
	borrowed := session(node, instance, 3)
	borrowed.JoinState = session(node, instance, 4).GetJoinState()
	denied("a join state of another generation", borrowed, commonv1.Reason_REASON_SESSION_UNKNOWN)
	borrowed.JoinState = session(ids.New(), instance, 3).GetJoinState()
	denied("a join state of another node", borrowed, commonv1.Reason_REASON_SESSION_UNKNOWN)

	third := session(node, instance, 3)
	if res := k.ready(replica, third)[0]; !res.GetAccepted() {
		t.Fatalf("generation 3: %v", res)
	}
	if g := k.get(node); g.SessionEpoch != 3 || g.SessionID != third.GetSessionId() || !g.SessionOpen ||
		g.ReplicaID != replica || g.SessionReadyAt == nil {
		t.Errorf("the gate is %+v", g)
	}
	if res := k.ready(replica, third)[0]; !res.GetAccepted() {
		t.Errorf("the same again: %v", res)
	}
	denied("an older generation", session(node, instance, 2), commonv1.Reason_REASON_SESSION_SUPERSEDED)
	denied("another instance of the node", session(node, ids.New(), 4), commonv1.Reason_REASON_NODE_NOT_ADMITTED)
	k.fence(node, 9, false)
	denied("a gate that is shut", session(node, instance, 4), commonv1.Reason_REASON_NODE_NOT_ADMITTED)
	k.fence(node, 10, true)
	fourth := session(node, instance, 4)
	fourth.LedgerId = ids.New()
	// Within a batch the order counts, and a refusal does not affect the other sessions.
	got := k.ready(replica, session(node, instance, 2), fourth, session(node, instance, 3))
	if got[0].GetAccepted() || !got[1].GetAccepted() || got[2].GetAccepted() {
		t.Errorf("a batch: %v", got)
	}
	if want := []bool{false, false, true}; !slices.Equal(k.heard.newLedger, want) {
		t.Errorf("tasks were reconciled with new ledgers %v, want %v", k.heard.newLedger, want)
	}
}

// TestABatchLocksBeforeItReconciles: the rows that any session of a batch may change are locked before the first
// change.
func TestABatchLocksBeforeItReconciles(t *testing.T) {
	k := newKit(t)
	machine, theInstance, ws, instance := k.node(), ids.New(), ids.New(), ids.New()
	_, err := k.server.ApplyFence(k.ctx, &lifecyclev1.ApplyFenceRequest{
		NodeId: theInstance, FenceEpoch: 1, Admitted: true, InstanceId: ids.New(), WorkspaceId: ws, Epoch: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	first := session(machine, instance, 1)
	k.ready(ids.New(), first)
	k.heard.locked, k.heard.order = nil, nil
	again, other := session(machine, instance, 2), session(theInstance, instance, 1)
	again.LedgerId = ids.New()
	task := ids.New()
	other.TasksInFlight = []*commonv1.TaskInFlight{{TaskId: task, Attempt: 1}, {TaskId: "an agent's word", Attempt: 1}}
	k.ready(ids.New(), again, other)
	want := gate.Ready{
		NodeIDs: []string{machine, theInstance}, NewLedgers: []string{machine}, Workspaces: []string{ws},
		TaskIDs: []string{task},
	}
	if len(k.heard.locked) != 1 || !reflect.DeepEqual(k.heard.locked[0], want) {
		t.Errorf("locked %+v, want %+v once", k.heard.locked, want)
	}
	if got := k.heard.order; !slices.Equal(got, []string{"lock", "reconcile", "reconcile"}) {
		t.Errorf("called %q", got)
	}
}

func TestAnInstanceWhoseWorkspaceRefusesItLeavesNothing(t *testing.T) {
	k := newKit(t)
	node, ws, instance := ids.New(), ids.New(), ids.New()
	_, err := k.server.ApplyFence(k.ctx,
		&lifecyclev1.ApplyFenceRequest{
			NodeId: node, FenceEpoch: 1, Admitted: true, InstanceId: ids.New(), WorkspaceId: ws,
			Epoch: 1,
		})
	if err != nil {
		t.Fatal(err)
	}
	k.heard.refuse = fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, "a later box")
	machine := k.node()
	got := k.ready(ids.New(), session(node, instance, 1), session(machine, instance, 1))
	if got[0].GetDenial().GetReason() != commonv1.Reason_REASON_EPOCH_SUPERSEDED || !got[1].GetAccepted() {
		t.Errorf("answered %v", got)
	}
	if g := k.get(node); g.SessionEpoch != 0 || g.SessionOpen {
		t.Errorf("the refused box's gate was raised: %+v", g)
	}
	k.heard.refuse = errors.New("no database")
	if _, err := k.server.SessionsReady(k.ctx,
		&lifecyclev1.SessionsReadyRequest{ReplicaId: ids.New(), Sessions: []*lifecyclev1.SessionReady{
			session(machine, instance, 2), session(node, instance, 1),
		}}); err == nil {
		t.Error("a failure of ours was answered as if it were decided")
	}
	if g := k.get(machine); g.SessionEpoch != 1 {
		t.Errorf("half a batch was kept: %+v", g)
	}
	k.heard.refuse = nil
	if res := k.ready(ids.New(), session(node, instance, 1))[0]; !res.GetAccepted() {
		t.Errorf("afterwards: %v", res)
	}
	if len(k.heard.instances) != 3 || k.heard.instances[2] != ws {
		t.Errorf("told of boxes %q", k.heard.instances)
	}
}

// TestAClosedSessionIsTheOneThatIsNamed: the close of a session that was replaced arrives after the opening of the next
// one.
func TestAClosedSessionIsTheOneThatIsNamed(t *testing.T) {
	k := newKit(t)
	const over = commonv1.SessionState_SESSION_STATE_CLOSED
	node, instance, replica := k.node(), ids.New(), ids.New()
	first, second := session(node, instance, 1), session(node, instance, 2)
	testkit.Beat(k.db, replica, "", 0, false)
	k.ready(replica, first)
	k.ready(replica, second)
	k.closed(node, first.GetSessionId(), over)
	if g := k.get(node); !g.SessionOpen || g.SessionID != second.GetSessionId() || !k.connected(node) {
		t.Errorf("the end of the first session ended the second: %+v", g)
	}
	k.closed(node, second.GetSessionId(), commonv1.SessionState_SESSION_STATE_DRAINING)
	if !k.connected(node) {
		t.Error("a session that was not said to be closed is open")
	}
	k.closed(node, second.GetSessionId(), over)
	if g := k.get(node); g.SessionOpen || g.SessionEpoch != 2 || k.connected(node) {
		t.Errorf("after its end: %+v", g)
	}
}

func TestASessionIsGoneWithItsReplica(t *testing.T) {
	k := newKit(t)
	node, replica := k.node(), ids.New()
	k.ready(replica, session(node, ids.New(), 1))
	if k.connected(node) {
		t.Error("a replica that was never heard of holds a session")
	}
	testkit.Beat(k.db, replica, "", 0, false)
	if !k.connected(node) {
		t.Error("a replica that beats holds no session")
	}
	testkit.SetClockOffset(k.db, 16*time.Second)
	if k.connected(node) {
		t.Error("a replica that fell silent holds a session")
	}
}

func TestCordonIsAboutPlacementAlone(t *testing.T) {
	k := newKit(t)
	node, instance := k.node(), ids.New()
	k.ready(ids.New(), session(node, instance, 1))
	res, err := k.server.SetCordon(k.ctx,
		&lifecyclev1.SetCordonRequest{NodeId: node, Cordoned: true, Reason: "a fan is loud"})
	if err != nil || !res.GetGate().GetCordoned() || res.GetPos() == "" {
		t.Fatalf("%v, %v", res, err)
	}
	if g := k.get(node); !g.Cordoned || g.CordonReason != "a fan is loud" || g.CordonedBy != "ann" || !g.Admitted ||
		g.SessionEpoch != 1 {
		t.Errorf("cordoned: %+v", g)
	}
	k.fence(node, 2, true) // a fence of recovery that admits the node does not end the cordon
	k.ready(ids.New(), session(node, instance, 2))
	if !k.get(node).Cordoned {
		t.Error("a fence or a session lifted the cordon")
	}
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		work, err := gate.LockForWork(ctx, tx, []string{node})
		if err != nil {
			return err
		}
		return work[node].MayLease(2, "")
	})
	if _, err := k.server.SetCordon(k.ctx, &lifecyclev1.SetCordonRequest{NodeId: node}); err != nil {
		t.Fatal(err)
	}
	if g := k.get(node); g.Cordoned || g.CordonReason != "" || g.CordonedBy != "" {
		t.Errorf("uncordoned: %+v", g)
	}
	if got := k.versions(node); !slices.Equal(got, []int64{1, 2, 3, 4, 5, 6}) {
		t.Errorf("told in versions %v", got)
	}
	for name, id := range map[string]string{"no node": ids.New(), "a retired one": k.retired()} {
		_, err := k.server.SetCordon(k.ctx, &lifecyclev1.SetCordonRequest{NodeId: id, Cordoned: true})
		f, refused := fault.As(err)
		if !refused || f.Reason != commonv1.Reason_REASON_NOT_FOUND || !strings.Contains(f.Public, "no enrolled node") ||
			!strings.Contains(f.Remedy, "gpuaas nodes get NODE") {
			t.Errorf("%s: %v", name, err)
		}
		k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.CordonFor(ctx, tx, id, "x", "y") }) // needs none
	}
}

func (k *kit) retired() string {
	k.t.Helper()
	id := ids.New()
	if _, err := k.server.ApplyFence(k.ctx,
		&lifecyclev1.ApplyFenceRequest{NodeId: id, FenceEpoch: 1, Retired: true}); err != nil {
		k.t.Fatal(err)
	}
	return id
}

// TestAFenceWaitsForWhoHoldsTheGateAndWhoComesAfterSeesIt checks that no dispatch commits after a fence has: the fence
// waits for transactions that hold the gate, and those that come after it see it.
func TestAFenceWaitsForWhoHoldsTheGateAndWhoComesAfterSeesIt(t *testing.T) {
	k := newKit(t)
	node := k.node()
	k.ready(ids.New(), session(node, ids.New(), 7))
	lease, err := k.pool.Begin(k.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer lease.Rollback(k.ctx) // it is committed below
	held, err := gate.LockForWork(k.ctx, lease, []string{node, ids.New()})
	if err != nil || len(held) != 1 || held[node].MayLease(7, "") != nil {
		t.Fatalf("%v, %v", held, err)
	}
	for what, err := range map[string]error{
		"a lower generation": held[node].MayLease(6, ""), "a higher one": held[node].MayLease(8, ""),
		"no gate": gate.View{}.MayLease(0, ""),
	} {
		if !fault.Has(err, commonv1.Reason_REASON_NODE_NOT_ADMITTED) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// Two leases do not wait for each other.
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := gate.LockForWork(ctx, tx, []string{node})
		return err
	})
	fenced := make(chan error, 1)
	go func() {
		_, err := k.server.ApplyFence(k.ctx, &lifecyclev1.ApplyFenceRequest{NodeId: node, FenceEpoch: 2})
		fenced <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting int
		err := k.pool.QueryRow(k.ctx, `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE NOT l.granted AND a.datname = current_database()`).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("no transaction waits")
		}
		return err
	})
	select {
	case err := <-fenced:
		t.Fatalf("the fence did not wait: %v", err)
	default:
	}
	if !k.get(node).Admitted {
		t.Error("the fence is seen before it is committed")
	}
	if err := lease.Commit(k.ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-fenced:
		if err != nil {
			t.Fatal(err)
		}
	case <-k.ctx.Done():
		t.Fatal("the fence still waits, with the gate unlocked")
	}
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		after, err := gate.LockForWork(ctx, tx, []string{node})
		if err == nil && !fault.Has(after[node].MayLease(7, ""), commonv1.Reason_REASON_NODE_NOT_ADMITTED) {
			t.Errorf("who comes after the fence may lease: %+v", after)
		}
		return err
	})
}
