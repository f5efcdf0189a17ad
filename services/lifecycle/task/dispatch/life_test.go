package dispatch_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1/lifecyclev1connect"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
	"github.com/gpuaas/mesh/internal/rpc/rpctest"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

func TestReconcileWithTheSameLedger(t *testing.T) {
	k := newKit(t)
	n := k.node()
	lost, held, begun, done := k.enqueue(n), k.enqueue(n), k.enqueue(n), k.enqueue(n)
	refs := map[string]*nodev1.TaskRef{}
	for _, l := range k.leaseOf(n).GetTasks() {
		refs[l.GetTask().GetTaskId()] = l.GetTask()
	}
	k.delivered(n, refs[held.TaskID], refs[begun.TaskID], refs[done.TaskID])
	k.started(n, refs[done.TaskID])
	// The offer of `lost` never arrived; `begun` has started and `done` has ended, and neither was reported.
	k.ready(n, inFlight(refs[held.TaskID], delivered), inFlight(refs[begun.TaskID], running),
		inFlight(refs[done.TaskID], succeeded))
	k.wants(held.TaskID, delivered, 1, 0)
	k.wants(begun.TaskID, running, 1, 0)
	k.wants(done.TaskID, running, 1, 0)
	if again := k.lease(n); again.GetTaskId() != lost.TaskID || again.GetAttempt() != 1 {
		t.Errorf("offered again: %v", again)
	}
	// The ledger lacks a task that was reported as delivered: the ledger decides about delivery, and the task is offered
	// again with its attempt.
	k.ready(n, inFlight(refs[begun.TaskID], running), inFlight(refs[done.TaskID], succeeded))
	again := map[string]int32{}
	for _, l := range k.leaseOf(n).GetTasks() {
		again[l.GetTask().GetTaskId()] = l.GetTask().GetAttempt()
	}
	if len(again) != 2 || again[held.TaskID] != 1 || again[lost.TaskID] != 1 {
		t.Errorf("offered again: %v", again)
	}
}

func TestReconcileWithANewLedger(t *testing.T) {
	k := newKit(t)
	n := k.node()
	run := ids.New()
	safe, unsafe, offered := k.enqueue(n), k.enqueue(n, ofType(restart), ofRun(run)), k.enqueue(n, ofType(restart))
	refs := map[string]*nodev1.TaskRef{}
	for _, l := range k.leaseOf(n).GetTasks() {
		refs[l.GetTask().GetTaskId()] = l.GetTask()
	}
	k.delivered(n, refs[safe.TaskID], refs[unsafe.TaskID])
	n.ledger = ids.New()
	k.ready(n)
	k.wants(safe.TaskID, queued, 1, 0)
	k.wants(unsafe.TaskID, unknown, 1, 0)
	k.wants(offered.TaskID, dispatched, 1, 0) // never stored anywhere: it cannot have run
	if k.wakes() != 1 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
	attempts := map[string]int32{}
	for _, l := range k.leaseOf(n).GetTasks() {
		attempts[l.GetTask().GetTaskId()] = l.GetTask().GetAttempt()
	}
	if attempts[safe.TaskID] != 2 || attempts[offered.TaskID] != 1 || len(attempts) != 2 {
		t.Errorf("leased %v", attempts)
	}
	k.result(n, refs[unsafe.TaskID], succeeded)
	k.wants(unsafe.TaskID, unknown, 1, 1)
}

// TestCancelledWithALostLedger: a task that may have run does not end as cancelled before it began, though it was to be
// cancelled.
func TestCancelledWithALostLedger(t *testing.T) {
	k := newKit(t)
	n := k.node()
	run := ids.New()
	ran, offered := k.enqueue(n, ofType(restart), ofRun(run)), k.enqueue(n, ofType(restart), ofRun(run))
	refs := map[string]*nodev1.TaskRef{}
	for _, l := range k.leaseOf(n).GetTasks() {
		refs[l.GetTask().GetTaskId()] = l.GetTask()
	}
	k.started(n, refs[ran.TaskID])
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := k.tasks.CancelOfRun(ctx, tx, run, "", "the person's request")
		return err
	})
	n.ledger = ids.New()
	if res := k.ready(n); len(res.GetCancel()) != 2 {
		t.Errorf("cancels %v", res.GetCancel())
	}
	k.wants(ran.TaskID, unknown, 1, 0)
	k.wants(offered.TaskID, cancelled, 1, 0) // never stored anywhere: it cannot have run
}

func TestSweepEndsWhatIsPastItsTime(t *testing.T) {
	k := newKit(t)
	here, away := k.node(), k.node()
	waits := k.enqueue(away, ofRun(ids.New()))
	sent, runs := k.enqueue(here), k.enqueue(here)
	var gone task.Row
	refs := map[string]*nodev1.TaskRef{}
	for _, l := range k.leaseOf(here).GetTasks() {
		refs[l.GetTask().GetTaskId()] = l.GetTask()
	}
	k.started(here, refs[runs.TaskID])
	third := k.node()
	gone = k.enqueue(third)
	goneRef := k.lease(third)
	k.delivered(third, goneRef)
	k.session(third, false)
	sweep := func(after time.Duration) dispatch.Swept {
		t.Helper()
		testkit.SetClockOffset(k.db, after)
		k.beat(here)
		s, err := k.tasks.Sweep(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := sweep(0); s != (dispatch.Swept{}) {
		t.Errorf("swept %+v before the time", s)
	}
	if s := sweep(61 * time.Second); s.Expired != 1 || s.Unknown != 1 {
		t.Errorf("swept %+v", s)
	}
	k.wants(waits.TaskID, expired, 0, 0)
	k.wants(gone.TaskID, unknown, 1, 0)
	k.wants(runs.TaskID, running, 1, 0)    // connected: its step's deadline decides
	k.wants(sent.TaskID, dispatched, 1, 0) // its delivery may be on the way
	if s := sweep(3 * time.Minute); s.Unknown != 1 {
		t.Errorf("swept %+v", s)
	}
	k.wants(sent.TaskID, unknown, 1, 0)
	k.wants(runs.TaskID, running, 1, 0)
	if k.wakes() != 1 {
		t.Errorf("the run was woken %d times", k.wakes())
	}
	// Late results of both are evidence.
	if !k.result(third, goneRef, succeeded) || !k.result(here, refs[sent.TaskID], failed) {
		t.Error("a late result is to be acknowledged")
	}
	k.wants(gone.TaskID, unknown, 1, 1)
	k.wants(sent.TaskID, unknown, 1, 1)
	// A silent replica's sessions count as gone.
	testkit.SetClockOffset(k.db, 5*time.Minute)
	if s, err := k.tasks.Sweep(t.Context()); err != nil || s.Unknown != 1 {
		t.Errorf("swept %+v, %v", s, err)
	}
	k.wants(runs.TaskID, unknown, 1, 0)
}

// session applies the opening or the end of a node's session, as the consumer of nodeapi's events does.
func (k *kit) session(n *node, open bool) {
	k.t.Helper()
	if open {
		k.t.Fatal("sessions open by SessionsReady")
	}
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		return gate.CloseSessions(ctx, tx, &nodev1.SessionChanged{
			NodeId: n.id, SessionId: n.session, State: commonv1.SessionState_SESSION_STATE_CLOSED,
		})
	})
}

// beat makes the replica of a node's session one that lives.
func (k *kit) beat(n *node) {
	k.t.Helper()
	var replica string
	if err := k.pool.QueryRow(k.t.Context(), `SELECT replica_id::text FROM lifecycle.node_gate WHERE node_id = $1`,
		n.id).Scan(&replica); err != nil {
		k.t.Fatal(err)
	}
	testkit.Beat(k.db, replica, "", 0, false)
}

func (k *kit) tx(fn func(context.Context, pgx.Tx) error) {
	k.t.Helper()
	if err := pg.InTx(k.t.Context(), k.pool, fn); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kit) change(id string, verb lifecyclev1.TaskVerb) (*lifecyclev1.Task, error) {
	res, err := k.tasks.ChangeTask(k.t.Context(),
		&lifecyclev1.ChangeTaskRequest{TaskId: id, Verb: verb, Reason: "a test's"})
	return res.GetTask(), err
}

func wantReason(t *testing.T, err error, reason commonv1.Reason) {
	t.Helper()
	if !fault.Has(err, reason) {
		t.Errorf("error %v, want %s", err, reason)
	}
}

func TestCancel(t *testing.T) {
	k := newKit(t)
	n := k.node()
	run := ids.New()
	sent := k.enqueue(n, ofRun(run))
	ref := k.lease(n)
	waits, undo := k.enqueue(n, ofRun(run)),
		k.enqueue(n, func(s *task.Spec) { s.RunID, s.IdempotencyKey = run, run+"/1/undo/1" })
	var rows []task.Row
	k.tx(func(ctx context.Context, tx pgx.Tx) error {
		var err error
		rows, err = k.tasks.CancelOfRun(ctx, tx, run, "", "the person's request")
		return err
	})
	if len(rows) != 2 {
		t.Fatalf("cancelled %d tasks", len(rows))
	}
	k.wants(waits.TaskID, cancelled, 0, 0) // no agent has it
	k.wants(sent.TaskID, dispatched, 1, 0) // cancel requested: its agent reports how it ended
	k.wants(undo.TaskID, queued, 0, 0)
	// The node's next session gets the cancel again.
	if res := k.ready(n, inFlight(ref, running)); len(res.GetCancel()) != 1 ||
		res.GetCancel()[0].GetTaskId() != sent.TaskID {
		t.Errorf("cancels %v", res.GetCancel())
	}
	k.result(n, ref, cancelled)
	k.wants(sent.TaskID, cancelled, 1, 0)
	k.result(n, ref, succeeded)
	k.wants(sent.TaskID, cancelled, 1, 1)
	_, err := k.change(sent.TaskID, lifecyclev1.TaskVerb_TASK_VERB_CANCEL)
	wantReason(t, err, commonv1.Reason_REASON_TASK_FINISHED)
	_, err = k.change(ids.New(), lifecyclev1.TaskVerb_TASK_VERB_CANCEL)
	wantReason(t, err, commonv1.Reason_REASON_NOT_FOUND)
}

func TestRequeueAndClose(t *testing.T) {
	k := newKit(t)
	n := k.node()
	safe, unsafe := k.enqueue(n), k.enqueue(n, ofType(restart))
	for _, l := range k.leaseOf(n).GetTasks() {
		k.delivered(n, l.GetTask())
	}
	for _, verb := range []lifecyclev1.TaskVerb{
		lifecyclev1.TaskVerb_TASK_VERB_REQUEUE,
		lifecyclev1.TaskVerb_TASK_VERB_CLOSE,
	} {
		_, err := k.change(safe.TaskID, verb)
		wantReason(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	}
	k.session(n, false)
	testkit.SetClockOffset(k.db, 2*time.Minute)
	if s, err := k.tasks.Sweep(t.Context()); err != nil || s.Unknown != 2 {
		t.Fatalf("swept %+v, %v", s, err)
	}
	_, err := k.change(unsafe.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE)
	wantReason(t, err, commonv1.Reason_REASON_PRECONDITION_FAILED)
	if got, err := k.change(unsafe.TaskID, lifecyclev1.TaskVerb_TASK_VERB_CLOSE); err != nil || got.GetState() != failed {
		t.Errorf("close: %v, %v", got, err)
	}
	if got, err := k.change(safe.TaskID, lifecyclev1.TaskVerb_TASK_VERB_REQUEUE); err != nil || got.GetState() != queued {
		t.Fatalf("requeue: %v, %v", got, err)
	}
	k.ready(n)
	if ref := k.lease(n); ref.GetTaskId() != safe.TaskID || ref.GetAttempt() != 2 {
		t.Errorf("leased %v", ref)
	}
}

// TestProbe: idempotent on its key, refused for a node that is not there.
func TestProbe(t *testing.T) {
	k := newKit(t)
	n := k.node()
	ask := func(id, key string) (*lifecyclev1.EnqueueProbeResponse, error) {
		return k.tasks.EnqueueProbe(t.Context(), &lifecyclev1.EnqueueProbeRequest{NodeId: id, IdempotencyKey: key})
	}
	first, err := ask(n.id, "k")
	if err != nil {
		t.Fatal(err)
	}
	second, err := ask(n.id, "k")
	if err != nil || second.GetTask().GetTaskId() != first.GetTask().GetTaskId() {
		t.Errorf("the same key: %v, %v", second, err)
	}
	if other, err := ask(n.id, ""); err != nil || other.GetTask().GetTaskId() == first.GetTask().GetTaskId() {
		t.Errorf("no key: %v, %v", other, err)
	}
	_, err = ask(ids.New(), "")
	wantReason(t, err, commonv1.Reason_REASON_NOT_FOUND)
}

// TestLostHintsAreSentAgain queues work behind the hub's back, as another replica does: the hub's next list names it,
// and each one after that, until it is leased.
func TestLostHintsAreSentAgain(t *testing.T) {
	k := newKit(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- k.hub.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	hints := k.watch(ctx)
	n, away := k.node(), k.node()
	k.session(away, false)
	k.enqueue(away)
	row := k.enqueue(n)
	for named := 0; named < 2; {
		k.until(hints, func(m *lifecyclev1.WatchWorkResponse) bool {
			if slices.Contains(m.GetNodeIds(), away.id) {
				t.Error("a node that is away was named")
			}
			if slices.Contains(m.GetNodeIds(), n.id) {
				named++
				return true
			}
			if len(m.GetNodeIds()) > 0 {
				t.Errorf("a list names %q and not the node with work", m.GetNodeIds())
			}
			return false
		})
	}
	ref := k.lease(n)
	if _, err := k.change(row.TaskID, lifecyclev1.TaskVerb_TASK_VERB_CANCEL); err != nil {
		t.Fatal(err)
	}
	for range 2 { // once by the hint, again by the sweep: the first may be lost
		k.until(hints, func(m *lifecyclev1.WatchWorkResponse) bool {
			return len(m.GetCancels()) > 0 && m.GetCancels()[0].GetTask().GetTaskId() == ref.GetTaskId()
		})
	}
}

// watch serves the tasks over mutual TLS and follows its hints.
func (k *kit) watch(ctx context.Context) <-chan *lifecyclev1.WatchWorkResponse {
	k.t.Helper()
	a := rpctest.NewAuthorities(k.t)
	set, err := pki.NewKeySet(k.key.Public())
	if err != nil {
		k.t.Fatal(err)
	}
	persons := assertion.NewVerifier(set, nil)
	srv, err := port.New(ctx, port.Deps{Logger: testkit.Logger(k.t), Persons: persons},
		port.Config{Name: "internal", Addr: "127.0.0.1:0", TLS: a.ServerTLS(k.t, "lifecycle")})
	if err != nil {
		k.t.Fatal(err)
	}
	path, handler := lifecyclev1connect.NewTaskServiceHandler(k.tasks, srv.HandlerOptions()...)
	if err := srv.Mount(path, handler); err != nil {
		k.t.Fatal(err)
	}
	rpctest.Run(k.t, srv)
	client := lifecyclev1connect.NewTaskServiceClient(a.Client(k.t, "lifecycle", a.Service(k.t, "nodeapi")),
		"https://"+srv.Addr().String(), calls.Options(calls.Config{})...)
	stream, err := client.WatchWork(ctx, &lifecyclev1.WatchWorkRequest{ReplicaId: ids.New()})
	if err != nil {
		k.t.Fatal(err)
	}
	out := make(chan *lifecyclev1.WatchWorkResponse, 64)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for stream.Receive() {
			select {
			case out <- stream.Msg():
			case <-ctx.Done():
				return
			}
		}
	}()
	k.t.Cleanup(func() {
		_ = stream.Close()
		<-read
	})
	return out
}

func (k *kit) until(hints <-chan *lifecyclev1.WatchWorkResponse, good func(*lifecyclev1.WatchWorkResponse) bool) {
	k.t.Helper()
	deadline := time.NewTimer(testkit.Patience)
	defer deadline.Stop()
	for {
		select {
		case m := <-hints:
			if good(m) {
				return
			}
		case <-deadline.C:
			k.t.Fatal("no such hint")
		}
	}
}

// TestALeaseWithoutAReportIsReportedByTheSweep: the node went away with the offer.
func TestALeaseWithoutAReportIsReportedByTheSweep(t *testing.T) {
	k := newKit(t)
	testkit.StopClock(k.db) // what is leased is offered again after two seconds
	n := k.node()
	row := k.enqueue(n)
	k.lease(n)
	k.session(n, false)
	sweep := func() {
		t.Helper()
		if _, err := k.tasks.Sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sweep()
	k.wantHistory(row.TaskID, "queued")
	testkit.SetClockOffset(k.db, 3*time.Second)
	for range 2 {
		sweep()
		k.wantHistory(row.TaskID, "queued", "dispatched")
	}
	k.ready(n)
	k.wantHistory(row.TaskID, "queued", "dispatched", "dispatched") // offered again
}

// TestASweepThatEndsALeaseReportsIt: the node went away with an offer of the last two seconds, and its time to start is
// over.
func TestASweepThatEndsALeaseReportsIt(t *testing.T) {
	k := newKit(t)
	n := k.node()
	row := k.enqueue(n)
	k.lease(n)
	k.session(n, false)
	if _, err := k.pool.Exec(t.Context(), `UPDATE lifecycle.task SET expires_at = mesh.clock() WHERE task_id = $1`,
		row.TaskID); err != nil {
		t.Fatal(err)
	}
	if s, err := k.tasks.Sweep(t.Context()); err != nil || s.Unknown != 1 {
		t.Errorf("swept %+v, %v", s, err)
	}
	k.wantHistory(row.TaskID, "queued", "dispatched", "outcome_unknown")
}

// TestEveryChangeOfALeaseReportsIt: the first event after a lease carries its transition, and no other event does.
func TestEveryChangeOfALeaseReportsIt(t *testing.T) {
	cases := []struct {
		name   string
		change func(*kit, *node, task.Row, *nodev1.TaskRef)
		want   []string
	}{
		{"cancel", func(k *kit, _ *node, row task.Row, _ *nodev1.TaskRef) {
			k.tx(func(ctx context.Context, tx pgx.Tx) error {
				_, err := k.tasks.CancelOfRun(ctx, tx, row.RunID, "", "not wanted")
				return err
			})
		}, []string{"queued", "dispatched", "dispatched", "succeeded"}},
		{"another session", func(k *kit, n *node, _ task.Row, ref *nodev1.TaskRef) {
			k.ready(n, inFlight(ref, delivered))
		}, []string{"queued", "dispatched", "delivered", "succeeded"}},
		{"progress", func(k *kit, n *node, _ task.Row, ref *nodev1.TaskRef) {
			k.report(n, func(r *lifecyclev1.NodeReport) {
				r.Progress = []*nodev1.TaskProgress{{Task: ref, Note: "half"}}
			})
		}, []string{"queued", "dispatched", "dispatched", "succeeded"}},
		{"fence", func(k *kit, n *node, _ task.Row, _ *nodev1.TaskRef) {
			k.fence(n, 2, false)
			k.fence(n, 3, true)
		}, []string{"queued", "dispatched", "succeeded"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			k := newKit(t)
			n := k.node()
			row := k.enqueue(n, ofRun(ids.New()))
			ref := k.lease(n)
			c.change(k, n, row, ref)
			if !k.result(n, ref, succeeded) {
				t.Fatal("the result is not acknowledged")
			}
			k.wantHistory(row.TaskID, c.want...)
		})
	}
}
