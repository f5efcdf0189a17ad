package dispatch_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

func TestQueueingTheSameRequestTwiceIsOneTask(t *testing.T) {
	k := newKit(t)
	n := k.node()
	const key = "run/step/1"
	var wg sync.WaitGroup
	rows := make([]task.Row, 8)
	for i := range rows {
		wg.Go(func() { rows[i] = k.enqueue(n, func(s *task.Spec) { s.IdempotencyKey = key }) })
	}
	wg.Wait()
	for _, r := range rows {
		if r.TaskID != rows[0].TaskID {
			t.Fatalf("two tasks: %s, %s", r.TaskID, rows[0].TaskID)
		}
	}
	k.wantHistory(rows[0].TaskID, "queued")
}

func TestLeaseIsSignedForItsNode(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db) // what is leased is offered again after two seconds
	n := k.node()
	row := k.enqueue(n, func(s *task.Spec) { s.Epoch, s.OpSeq, s.WorkspaceID = 3, 7, ids.New() })
	res := k.leaseOf(n)
	if len(res.GetTasks()) != 1 {
		t.Fatalf("leased %v", res)
	}
	set, err := envelope.NewVerifierSet(k.key.Public())
	if err != nil {
		t.Fatal(err)
	}
	offer := res.GetTasks()[0].GetOffer()
	got, err := envelope.Verify(set, offer.GetEnvelope(), offer.GetSignature(), offer.GetKeyId())
	if err != nil {
		t.Fatal(err)
	}
	if got.TaskID != row.TaskID || got.NodeID != n.id || got.Epoch != 3 || got.OpSeq != 7 || got.Attempt != 1 {
		t.Errorf("envelope %+v", got)
	}
	if err := got.Check(n.id, time.Now()); err != nil {
		t.Error(err)
	}
	k.wants(row.TaskID, dispatched, 1, 0)
	if again := k.leaseOf(n); len(again.GetTasks()) != 0 {
		t.Errorf("offered again at once: %v", again.GetTasks())
	}
	k.wantHistory(row.TaskID, "queued") // the report of the attempt will carry the lease
}

func TestLeaseStopsAtTheGate(t *testing.T) {
	k := newKit(t)
	shut, behind, ahead, open := k.node(), k.node(), k.node(), k.node()
	unknown := &node{id: ids.New(), session: ids.New(), generation: 1}
	for _, n := range []*node{shut, behind, ahead, open} {
		k.enqueue(n)
	}
	k.fence(shut, 2, false)
	behind.generation--
	ahead.generation++
	cases := []struct {
		name string
		node *node
	}{
		{"gate shut", shut},
		{"older session", behind},
		{"session that was not confirmed to lifecycle", ahead},
		{"no gate", unknown},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			req := &lifecyclev1.LeaseTasksRequest{Nodes: []*lifecyclev1.NodeLease{{
				NodeId: c.node.id, SessionId: c.node.session,
				Generation: max(c.node.generation, 0), MaxTasks: 8,
			}}}
			res, err := k.tasks.LeaseTasks(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			if len(res.GetTasks()) != 0 || len(res.GetRefused()) != 1 ||
				res.GetRefused()[0].GetDenial().GetReason() != commonv1.Reason_REASON_NODE_NOT_ADMITTED {
				t.Errorf("lease: %v", res)
			}
		})
	}
	if got := k.leaseOf(open).GetTasks(); len(got) != 1 {
		t.Errorf("open gate: %d tasks", len(got))
	}
}

func TestCordonDoesNotStopWhatIsForTheNodeItself(t *testing.T) {
	k := newKit(t)
	n := k.node()
	k.enqueue(n)
	if _, err := k.gates.SetCordon(t.Context(),
		&lifecyclev1.SetCordonRequest{NodeId: n.id, Cordoned: true, Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	k.lease(n)
}

func TestOfferIsRepeatedWithItsAttemptAfterTwoSeconds(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db) // what is leased is offered again after two seconds
	n := k.node()
	row := k.enqueue(n)
	first := k.lease(n)
	testkit.SetClockOffset(k.db, 1500*time.Millisecond)
	if res := k.leaseOf(n); len(res.GetTasks()) != 0 {
		t.Fatal("offered again within two seconds")
	}
	testkit.SetClockOffset(k.db, 3*time.Second)
	if again := k.lease(n); again.GetAttempt() != first.GetAttempt() {
		t.Errorf("offered again as attempt %d", again.GetAttempt())
	}
	k.wantHistory(row.TaskID, "queued", "dispatched") // not reported in time: the second offer reports the lease
	testkit.SetClockOffset(k.db, 6*time.Second)
	k.lease(n)
	k.wantHistory(row.TaskID, "queued", "dispatched")
	k.delivered(n, first)
	testkit.SetClockOffset(k.db, 10*time.Second)
	if res := k.leaseOf(n); len(res.GetTasks()) != 0 {
		t.Error("a delivered task was offered again")
	}
	k.wantHistory(row.TaskID, "queued", "dispatched", "delivered")
	// Its last moment to start has passed: it is not offered again, though it was never delivered.
	late := k.enqueue(n)
	k.lease(n)
	testkit.SetClockOffset(k.db, 5*time.Minute)
	if res := k.leaseOf(n); len(res.GetTasks()) != 0 {
		t.Errorf("task %s offered after its time", late.TaskID)
	}
}

func TestConcurrentLeasesNeverShareATask(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db) // what is leased is offered again after two seconds
	n := k.node()
	const tasks, replicas = 200, 8
	for range tasks {
		k.enqueue(n)
	}
	var mu sync.Mutex
	seen := map[string]int{}
	var wg sync.WaitGroup
	for range replicas {
		wg.Go(func() {
			for empty := 0; empty < 3; {
				res, err := k.tasks.LeaseTasks(t.Context(), &lifecyclev1.LeaseTasksRequest{
					Nodes: []*lifecyclev1.NodeLease{{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 7}},
				})
				if err != nil {
					t.Error(err)
					return
				}
				if len(res.GetTasks()) == 0 {
					empty++
				}
				mu.Lock()
				for _, l := range res.GetTasks() {
					seen[l.GetTask().GetTaskId()]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(seen) != tasks {
		t.Errorf("leased %d of %d tasks", len(seen), tasks)
	}
	for id, times := range seen {
		if times != 1 {
			t.Errorf("task %s leased %d times", id, times)
		}
	}
}

// TestNoDispatchCommitsAfterTheFence races fences with leases and reads the order of commits from the event log: the
// dispatch's event and the fence's carry a sequence drawn under the gate's lock.
func TestNoDispatchCommitsAfterTheFence(t *testing.T) {
	k := newKit(t)
	rounds := 60
	refusedAfter, dispatchedBefore := 0, 0
	for range rounds {
		n := k.node()
		for range 4 {
			k.enqueue(n)
		}
		start := make(chan struct{})
		var wg sync.WaitGroup
		var fencedAt time.Time
		for range 3 {
			wg.Go(func() {
				<-start
				for range 6 {
					_, err := k.tasks.LeaseTasks(t.Context(), &lifecyclev1.LeaseTasksRequest{
						Nodes: []*lifecyclev1.NodeLease{{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 1}},
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Go(func() {
			<-start
			_, err := k.gates.ApplyFence(t.Context(),
				&lifecyclev1.ApplyFenceRequest{NodeId: n.id, FenceEpoch: 2, Admitted: false})
			if err != nil {
				t.Error(err)
			}
			fencedAt = time.Now()
		})
		close(start)
		wg.Wait()
		var before, after int
		var fenced int64
		list := testkit.Events(t, k.pool,
			`(kind = 'gate.changed' AND aggregate_id = $1) OR (kind = 'task.changed' AND node_id = $1)`, n.id)
		for _, e := range list {
			if e.Kind == "gate.changed" {
				fenced = e.Seq
			}
		}
		for _, e := range list {
			switch {
			case e.Text("task", "state") != "TASK_STATE_DISPATCHED":
			case e.Seq < fenced:
				before++
			default:
				after++
			}
		}
		// A fence reports the leases before it, and no later one would have an event yet.
		var leased int
		if err := k.pool.QueryRow(t.Context(), `SELECT count(*) FROM lifecycle.task WHERE node_id = $1 AND attempt > 0`,
			n.id).Scan(&leased); err != nil {
			t.Fatal(err)
		}
		if leased != before {
			t.Fatalf("%d tasks are leased, %d dispatches are reported before the fence of %s", leased, before, fencedAt)
		}
		if after != 0 {
			t.Fatalf("%d dispatches committed after the fence of %s", after, fencedAt)
		}
		dispatchedBefore += before
		if before < 4 {
			refusedAfter++
		}
	}
	if dispatchedBefore == 0 || refusedAfter == 0 {
		t.Errorf("the race was never close: %d dispatches before, %d rounds with refusals", dispatchedBefore, refusedAfter)
	}
}

// TestFenceWaitsForTheLeaseUnderWay holds a lease's transaction open and checks that the fence commits only after it.
func TestFenceWaitsForTheLeaseUnderWay(t *testing.T) {
	k := newKit(t)
	n := k.node()
	locked, err := k.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := locked.Exec(t.Context(), `SELECT FROM lifecycle.node_gate WHERE node_id = $1 FOR SHARE`,
		n.id); err != nil {
		t.Fatal(err)
	}
	fenced := make(chan error, 1)
	go func() {
		_, err := k.gates.ApplyFence(t.Context(),
			&lifecyclev1.ApplyFenceRequest{NodeId: n.id, FenceEpoch: 2, Admitted: false})
		fenced <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error { return k.waiting(t.Context()) })
	select {
	case err := <-fenced:
		t.Fatalf("the fence did not wait: %v", err)
	default:
	}
	if err := locked.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-fenced; err != nil {
		t.Fatal(err)
	}
	if res := k.leaseOf(n); len(res.GetRefused()) != 1 {
		t.Error("lease after the fence")
	}
}

// waiting returns nil when a backend waits for a lock.
func (k *kit) waiting(ctx context.Context) error {
	var n int
	if err := k.db.OwnerPool().QueryRow(ctx, `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
		WHERE NOT l.granted AND a.datname = current_database()`).Scan(&n); err != nil {
		return err
	}
	if n == 0 {
		return pgx.ErrNoRows
	}
	return nil
}

func TestLowerFenceChangesNothing(t *testing.T) {
	k := newKit(t)
	n := k.node()
	k.fence(n, 5, false)
	for _, epoch := range []int64{5, 4, 1} {
		res, err := k.gates.ApplyFence(t.Context(),
			&lifecyclev1.ApplyFenceRequest{NodeId: n.id, FenceEpoch: epoch, Admitted: true})
		if err != nil {
			t.Fatal(err)
		}
		if res.GetAdmitted() || res.GetFenceEpoch() != 5 {
			t.Errorf("epoch %d: %v", epoch, res)
		}
	}
	k.fence(n, 6, true)
}

// TestSessionsOfABatchDoNotSpoilEachOther puts a forged join state, an older generation, a shut gate and two sessions
// of one node beside a good one.
func TestSessionsOfABatchDoNotSpoilEachOther(t *testing.T) {
	k := newKit(t)
	good, forged, old, shut, twice, odd := k.node(), k.node(), k.node(), k.node(), k.node(), k.node()
	k.ready(old)
	k.fence(shut, 2, false)
	next := func(n *node) *lifecyclev1.SessionReady {
		n.generation++
		n.session = ids.New()
		return k.sessionReady(n)
	}
	older := k.sessionReady(&node{
		id: old.id, instance: old.instance, ledger: old.ledger, session: ids.New(),
		generation: 1,
	})
	bad := next(forged)
	state := bad.GetJoinState()
	state[len(state)-1] ^= 1
	first, second := next(twice), next(twice)
	strange := next(odd)
	strange.TasksInFlight = []*commonv1.TaskInFlight{
		{TaskId: "not an id", Attempt: 1},
		{TaskId: ids.New(), Attempt: 9, State: running},
	}
	reqs := []*lifecyclev1.SessionReady{next(good), bad, older, next(shut), second, first, strange}
	res, err := k.gates.SessionsReady(t.Context(), &lifecyclev1.SessionsReadyRequest{ReplicaId: ids.New(), Sessions: reqs})
	if err != nil {
		t.Fatal(err)
	}
	want := []commonv1.Reason{
		0, commonv1.Reason_REASON_SESSION_UNKNOWN, commonv1.Reason_REASON_SESSION_SUPERSEDED,
		commonv1.Reason_REASON_NODE_NOT_ADMITTED, 0, commonv1.Reason_REASON_SESSION_SUPERSEDED, 0,
	}
	for i, one := range res.GetResults() {
		if one.GetDenial().GetReason() != want[i] || one.GetAccepted() != (want[i] == 0) ||
			one.GetSessionId() != reqs[i].GetSessionId() {
			t.Errorf("session %d: %v", i, one)
		}
		if d := one.GetDenial(); d != nil && d.GetAction() != commonv1.Action_ACTION_WAIT {
			t.Errorf("session %d is told %s", i, d.GetAction())
		}
	}
	if n := len(res.GetResults()[6].GetCancel()); n != 1 {
		t.Errorf("a task that is not known here: %d cancels", n)
	}
}

// TestARefusedDeployIsAnnounced: the lease that ends a deploy whose values do not open calls Committed for its events,
// even if it offers nothing.
func TestARefusedDeployIsAnnounced(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n, ofType(commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY), func(s *task.Spec) {
		s.Payload = &nodev1.WorkloadDeploy{Workload: &nodev1.Workload{
			Name:      "w",
			SealedEnv: map[string][]byte{"SECRET": []byte("of no key")},
		}}
	})
	said := 0
	k.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Key: k.key, Hub: k.hub, Committed: func() { said++ },
		Wake: func(context.Context, pgx.Tx, ...string) error { return nil },
	})
	if res := k.leaseOf(n); len(res.GetTasks()) != 0 {
		t.Fatalf("leased %v", res.GetTasks())
	}
	k.wantHistory(row.TaskID, "queued", "dispatched", "failed")
	if said != 1 {
		t.Errorf("the commit is announced %d times", said)
	}
}
