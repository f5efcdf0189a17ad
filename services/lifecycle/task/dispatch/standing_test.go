package dispatch_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// leaseStanding makes a standing lease of a node for a stream's replica.
func (s *streamed) leaseStanding(stream *workStream, n *node) {
	s.k.t.Helper()
	frame := leaseFrame(9000, n)
	frame.GetLease().Standing = true
	if res := s.ask(stream, frame); res.GetLease() == nil || len(res.GetLease().GetRefused()) > 0 {
		s.k.t.Fatalf("answered %v", res)
	}
}

// probe queues a task as a probe is queued, and returns its id.
func (s *streamed) probe(n *node, change ...func(*task.Spec)) string {
	s.k.t.Helper()
	spec := task.Spec{Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: &nodev1.ProbeNoop{Nonce: "n"}}
	for _, c := range change {
		c(&spec)
	}
	row, isNew, err := s.k.tasks.Queue(s.k.t.Context(), spec)
	if err != nil || !isNew {
		s.k.t.Fatalf("queue: %v, new %v", err, isNew)
	}
	return row.TaskID
}

// offered wants one task on the stream that no lease of the replica requested.
func (s *streamed) offered(stream *workStream, n *node, id string) *nodev1.TaskRef {
	s.k.t.Helper()
	received, failed := make(chan *lifecyclev1.StreamWorkResponse, 1), make(chan error, 1)
	go func() {
		if res, err := stream.Receive(); err != nil {
			failed <- err
		} else {
			received <- res
		}
	}()
	var res *lifecyclev1.StreamWorkResponse
	select {
	case res = <-received:
	case err := <-failed:
		s.k.t.Fatal(err)
	case <-time.After(testkit.Patience):
		s.k.t.Fatalf("task %s was not offered within %s", id, testkit.Patience)
	}
	tasks := res.GetLease().GetTasks()
	if res.GetId() != 0 || len(tasks) != 1 || tasks[0].GetTask().GetTaskId() != id ||
		tasks[0].GetSessionId() != n.session || tasks[0].GetNodeId() != n.id {
		s.k.t.Fatalf("unasked came %v", res)
	}
	return tasks[0].GetTask()
}

// TestATaskIsLeasedAsItIsQueued checks that a session with a standing lease gets a task without a further lease, with
// the same attempts and the same history, and the next one when its agent has reported on the first.
func TestATaskIsLeasedAsItIsQueued(t *testing.T) {
	s := newStreamed(t)
	s.k.tasks.KeepUnderWay()
	n, other := s.k.node(), s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	before := s.probe(n)
	s.k.wants(before, queued, 0, 0)
	s.leaseStanding(stream, n) // which leases it
	s.k.wants(before, dispatched, 1, 0)
	first := s.probe(n)
	ref := s.offered(stream, n, first)
	s.k.wants(first, dispatched, 1, 0)
	second, foreign := s.probe(n), s.probe(other)
	s.k.wants(second, queued, 0, 0)
	s.k.wants(foreign, queued, 0, 0)
	res := s.ask(stream, &lifecyclev1.StreamWorkRequest{Id: 1, Request: &lifecyclev1.StreamWorkRequest_Report{
		Report: &lifecyclev1.ReportTasksRequest{ReplicaId: ids.New(), Reports: []*lifecyclev1.NodeReport{{
			NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, LedgerId: n.ledger,
			Results: []*nodev1.TaskResult{{Task: ref, State: succeeded}},
		}}},
	}})
	if got := res.GetReport().GetResults(); len(got) != 1 || len(got[0].GetAcknowledged()) != 1 {
		t.Fatalf("answered %v", res)
	}
	s.k.wants(first, succeeded, 1, 0)
	if h := s.k.history(first); !slices.Equal(h, []string{"queued", "dispatched", "succeeded"}) {
		t.Errorf("history %v", h)
	}
	s.offered(stream, n, s.probe(n))
}

// TestALeaseWithoutARequestIsCheckedByTheGate checks that a task is not leased as it is queued if the gate is shut,
// raised to another session, or locked by a fence under way, nor to a session that was named as ended, nor over a
// stream that has ended; and that queueing waits for no gate.
func TestALeaseWithoutARequestIsCheckedByTheGate(t *testing.T) {
	for name, change := range map[string]func(s *streamed, stream *workStream, n *node) (undo func()){
		"gate shut":       func(s *streamed, _ *workStream, n *node) func() { s.k.fence(n, 2, false); return nil },
		"another session": func(s *streamed, _ *workStream, n *node) func() { s.k.ready(n); return nil },
		"fence under way": func(s *streamed, _ *workStream, n *node) func() {
			tx, err := s.k.pool.Begin(s.k.t.Context())
			if err != nil {
				s.k.t.Fatal(err)
			}
			if _, err := tx.Exec(s.k.t.Context(), `UPDATE lifecycle.node_gate SET admitted = false WHERE node_id = $1`,
				n.id); err != nil {
				s.k.t.Fatal(err)
			}
			return func() { _ = tx.Rollback(context.WithoutCancel(s.k.t.Context())) }
		},
		"session ended": func(s *streamed, stream *workStream, n *node) func() {
			res := s.ask(stream, &lifecyclev1.StreamWorkRequest{Id: 7, Request: &lifecyclev1.StreamWorkRequest_End{
				End: &lifecyclev1.EndLeasesRequest{Sessions: []*lifecyclev1.NodeSession{{NodeId: n.id, SessionId: n.session}}},
			}})
			if res.GetEnd() == nil {
				s.k.t.Fatalf("answered %v", res)
			}
			return nil
		},
		"stream ended": func(s *streamed, stream *workStream, _ *node) func() {
			_ = stream.CloseRequest()
			for {
				if _, err := stream.Receive(); err != nil {
					return nil
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStreamed(t)
			s.k.tasks.KeepUnderWay()
			n := s.k.node()
			stream, err := s.open("nodeapi")
			if err != nil {
				t.Fatal(err)
			}
			s.leaseStanding(stream, n)
			undo := change(s, stream, n)
			id := s.probe(n)
			s.k.wants(id, queued, 0, 0)
			if s.k.tasks.HasStandingLease(n.id) {
				t.Error("a session that was refused has a standing lease")
			}
			if undo == nil {
				return
			}
			undo()
			s.k.wants(s.probe(n), queued, 0, 0)
			s.leaseStanding(stream, n) // the node's next lease
			s.offered(stream, n, s.probe(n))
		})
	}
}

// TestAnUncommittedTaskIsNotOffered checks that a task which is queued in a caller's transaction is offered after its
// commit alone.
func TestAnUncommittedTaskIsNotOffered(t *testing.T) {
	s := newStreamed(t)
	n, other := s.k.node(), s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	s.leaseStanding(stream, n)
	s.leaseStanding(stream, other)
	undone := errors.New("undone")
	var id string
	in := func(n *node, end error) error {
		return pg.InTx(t.Context(), s.k.pool, func(ctx context.Context, tx pgx.Tx) error {
			row, err := s.k.tasks.Enqueue(ctx, tx,
				task.Spec{Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: &nodev1.ProbeNoop{}})
			id = row.TaskID
			return errors.Join(err, end)
		})
	}
	if err := in(n, undone); !errors.Is(err, undone) {
		t.Fatal(err)
	}
	if err := in(other, nil); err != nil {
		t.Fatal(err)
	}
	s.offered(stream, other, id) // and nothing came before it
	s.k.wants(id, dispatched, 1, 0)
}

// Scenario: standing-lease-unused. A session to which a task was to be leased as it was queued is free for the next
// task if that was none: its key existed already, or its transaction was undone.
func TestASessionThatGotNoTaskIsGivenBack(t *testing.T) {
	undone := errors.New("undone")
	cases := map[string]func(s *streamed, spec task.Spec) error{
		"a repeat": func(s *streamed, spec task.Spec) error {
			_, isNew, err := s.k.tasks.Queue(s.k.t.Context(), spec)
			if isNew {
				err = errors.Join(err, errors.New("a repeat is new"))
			}
			return err
		},
		"a repeat in a caller's transaction": func(s *streamed, spec task.Spec) error {
			return pg.InTx(s.k.t.Context(), s.k.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := s.k.tasks.Enqueue(ctx, tx, spec)
				return err
			})
		},
		"undone": func(s *streamed, spec task.Spec) error {
			spec.IdempotencyKey = ids.New()
			err := pg.InTx(s.k.t.Context(), s.k.pool, func(ctx context.Context, tx pgx.Tx) error {
				_, err := s.k.tasks.Enqueue(ctx, tx, spec)
				return errors.Join(err, undone)
			})
			if !errors.Is(err, undone) {
				return err
			}
			return nil
		},
		"a savepoint was undone": func(s *streamed, spec task.Spec) error {
			spec.IdempotencyKey = ids.New()
			return pg.InTx(s.k.t.Context(), s.k.pool, func(ctx context.Context, tx pgx.Tx) error {
				err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
					_, err := s.k.tasks.Enqueue(ctx, tx, spec)
					return errors.Join(err, undone)
				})
				if !errors.Is(err, undone) {
					return err
				}
				return nil
			})
		},
		"refused by the database": func(s *streamed, spec task.Spec) error {
			spec.IdempotencyKey, spec.CreatedBy = ids.New(), "a text with \x00"
			if _, _, err := s.k.tasks.Queue(s.k.t.Context(), spec); err == nil {
				return errors.New("it was queued")
			}
			return nil
		},
	}
	for name, queue := range cases {
		t.Run(name, func(t *testing.T) {
			s := newStreamed(t)
			s.k.tasks.KeepUnderWay()
			n := s.k.node()
			stream, err := s.open("nodeapi")
			if err != nil {
				t.Fatal(err)
			}
			spec := task.Spec{Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: &nodev1.ProbeNoop{Nonce: "n"}}
			s.probe(n, func(first *task.Spec) { *first = spec })
			s.leaseStanding(stream, n) // which leases the first
			if err := queue(s, spec); err != nil {
				t.Fatal(err)
			}
			s.offered(stream, n, s.probe(n))
			s.k.wants(s.probe(n), queued, 0, 0) // the session is claimed now
		})
	}
}

// Scenario: standing-lease-lost-answer. A task is leased as it is queued, and the answer to the COMMIT is lost. The
// session is not free for the next task, since the first may stand as dispatched to it; the node's next lease offers
// the first.
func TestASessionIsNotGivenBackAfterALostAnswer(t *testing.T) {
	s := newStreamed(t)
	s.k.tasks.KeepUnderWay()
	n := s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	s.leaseStanding(stream, n)
	pool, lose := testkit.LossyPool(t, s.k.db.URL(pg.RoleLifecycle))
	var id string
	err = pg.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		row, err := s.k.tasks.Enqueue(ctx, tx,
			task.Spec{Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: &nodev1.ProbeNoop{}})
		id = row.TaskID
		lose()
		return err
	})
	if !errors.Is(err, pg.ErrCommitUnknown) {
		t.Fatalf("the commit that was not answered: %v", err)
	}
	s.k.wants(id, dispatched, 1, 0)
	s.k.wants(s.probe(n), queued, 0, 0)
	testkit.SetClockOffset(s.k.db, 3*time.Second) // an offer counts as lost after two
	offered := map[string]bool{}
	for _, leased := range s.k.leaseOf(n).GetTasks() {
		offered[leased.GetTask().GetTaskId()] = true
	}
	if !offered[id] {
		t.Errorf("the node's next lease offers %v, want the task %s too", offered, id)
	}
}

// TestInRollbackModeProbesAloneAreLeasedUnasked checks that what changes something is not leased in rollback mode,
// asked for or not.
func TestInRollbackModeProbesAloneAreLeasedUnasked(t *testing.T) {
	s := newStreamed(t)
	n, other := s.k.node(), s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	s.leaseStanding(stream, n)
	s.leaseStanding(stream, other)
	testkit.SetRollback(s.k.db, true)
	held := s.probe(n, ofType(deploy))
	s.offered(stream, other, s.probe(other))
	s.k.wants(held, queued, 0, 0)
}

// TestALeaseUnderWayStandsForNoEndedStream checks that a lease which ends after its stream adds no session that tasks
// may be leased to as they are queued.
func TestALeaseUnderWayStandsForNoEndedStream(t *testing.T) {
	s := newStreamed(t)
	n, other := s.k.node(), s.k.node()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	s.leaseStanding(stream, other)
	ctx := testkit.Context(t)
	held, err := s.k.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(context.WithoutCancel(ctx)) // it is committed below
	if _, err := held.Exec(ctx, `SELECT FROM lifecycle.node_gate WHERE node_id = $1 FOR UPDATE`, n.id); err != nil {
		t.Fatal(err)
	}
	frame := leaseFrame(1, n)
	frame.TimeoutMs, frame.GetLease().Standing = 30_000, true
	if err := stream.Send(frame); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, testkit.Patience, func() error { return s.k.waiting(ctx) })
	_ = stream.CloseRequest()
	testkit.Eventually(t, testkit.Patience, func() error { // the stream's sessions are removed
		if s.k.tasks.HasStandingLease(other.id) {
			return errors.New("a session of the stream has a standing lease")
		}
		return nil
	})
	if err := held.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if res, err := stream.Receive(); err != nil || res.GetLease() == nil {
		t.Fatalf("answered %v, %v", res, err)
	}
	if s.k.tasks.HasStandingLease(n.id) {
		t.Error("the session of an ended stream has a standing lease")
	}
	s.k.wants(s.probe(n), queued, 0, 0)
}

// TestLargeTasksComeInSeveralMessages checks that tasks which are leased together, on request or as they are queued,
// are sent in messages that are small enough for a replica to read, and that all of them arrive.
func TestLargeTasksComeInSeveralMessages(t *testing.T) {
	const nodes = 30
	large := &nodev1.ProbeNoop{Nonce: strings.Repeat("n", 200<<10)}
	s := newStreamed(t)
	s.k.tasks.KeepUnderWay()
	stream, err := s.open("nodeapi")
	if err != nil {
		t.Fatal(err)
	}
	var list []*node
	for range nodes {
		n := s.k.node()
		s.leaseStanding(stream, n)
		list = append(list, n)
	}
	want := map[string]bool{}
	err = pg.InTx(t.Context(), s.k.pool, func(ctx context.Context, tx pgx.Tx) error {
		for _, n := range list {
			row, err := s.k.tasks.Enqueue(ctx, tx,
				task.Spec{Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: large})
			if err != nil {
				return err
			}
			want[row.TaskID] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for len(want) > 0 {
		res, err := stream.Receive()
		if err != nil {
			t.Fatalf("%d of %d tasks have not come: %v", len(want), nodes, err)
		}
		for _, one := range res.GetLease().GetTasks() {
			delete(want, one.GetTask().GetTaskId())
		}
	}
	frame := leaseFrame(1, list[0])
	for range 7 {
		n := s.k.node()
		for range 4 {
			s.k.enqueue(n, func(spec *task.Spec) { spec.Payload = large })
		}
		frame.GetLease().Nodes = append(frame.GetLease().Nodes, leaseFrame(1, n).GetLease().GetNodes()...)
	}
	if res := s.ask(stream, frame); len(res.GetLease().GetTasks()) == 0 {
		t.Fatalf("answered %v", res)
	}
}
