package dispatch_test

import (
	"context"
	"crypto/ed25519"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/joinstate"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	queued     = commonv1.TaskState_TASK_STATE_QUEUED
	dispatched = commonv1.TaskState_TASK_STATE_DISPATCHED
	delivered  = commonv1.TaskState_TASK_STATE_DELIVERED
	running    = commonv1.TaskState_TASK_STATE_RUNNING
	succeeded  = commonv1.TaskState_TASK_STATE_SUCCEEDED
	failed     = commonv1.TaskState_TASK_STATE_FAILED
	expired    = commonv1.TaskState_TASK_STATE_EXPIRED
	cancelled  = commonv1.TaskState_TASK_STATE_CANCELLED
	unknown    = commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN

	noop    = commonv1.TaskType_TASK_TYPE_PROBE_NOOP
	restart = commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART
)

// kit is lifecycle's task and gate servers over a database of their own.
type kit struct {
	t      *testing.T
	db     *testkit.Database
	pool   *pgxpool.Pool
	tasks  *dispatch.Server
	gates  *gate.Server
	hub    *dispatch.Hub
	key    envelope.Key
	former envelope.Key // signed tasks before key did
	keys   *joinstate.Keys
	signal *events.Signal

	mu         sync.Mutex
	woken      []string
	superseded atomic.Int64
}

type noInstance struct{}

func (noInstance) SessionReady(context.Context, pgx.Tx, gate.Gate) error { return nil }

func (noInstance) RegisterFailures(context.Context, pgx.Tx, string, int64, int32, string) error {
	return nil
}

func newKit(t *testing.T) *kit {
	t.Helper()
	testkit.IO(t)
	k := &kit{t: t, db: testkit.DB(t), signal: &events.Signal{}}
	k.pool = k.db.Pool(pg.RoleLifecycle)
	k.key, k.former = envelope.NewKey(private(t)), envelope.NewKey(private(t))
	verifiers, err := envelope.NewVerifierSet(k.key.Public(), k.former.Public())
	if err != nil {
		t.Fatal(err)
	}
	if k.keys, err = joinstate.NewKeys(private(t)); err != nil {
		t.Fatal(err)
	}
	public, err := k.keys.Public()
	if err != nil {
		t.Fatal(err)
	}
	verifier, err := joinstate.NewVerifier(public)
	if err != nil {
		t.Fatal(err)
	}
	k.hub = dispatch.NewHub(testkit.Logger(t), k.pool, k.signal)
	k.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Key: k.key, Verifiers: verifiers, Hub: k.hub, Committed: func() {},
		Superseded: func(n int) { k.superseded.Add(int64(n)) },
		Wake: func(_ context.Context, _ pgx.Tx, runs ...string) error {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.woken = append(k.woken, runs...)
			return nil
		},
	})
	k.gates = gate.NewServer(gate.Deps{
		Logger: testkit.Logger(t), DB: k.pool, Join: verifier, Tasks: k.tasks, Instances: noInstance{}, Committed: func() {},
		Slots: 1,
	})
	return k
}

func private(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// node is one admitted node with the session that it opened last.
type node struct {
	id, instance, ledger, session string
	generation                    int64
}

// node makes a node whose gate is open and raised to its first session.
func (k *kit) node() *node {
	k.t.Helper()
	n := &node{id: ids.New(), instance: ids.New(), ledger: ids.New()}
	k.fence(n, 1, true)
	k.ready(n)
	return n
}

func (k *kit) fence(n *node, epoch int64, admitted bool) {
	k.t.Helper()
	res, err := k.gates.ApplyFence(k.t.Context(), &lifecyclev1.ApplyFenceRequest{
		NodeId: n.id, NodeInstanceId: n.instance, Name: "n", FenceEpoch: epoch, Admitted: admitted,
	})
	if err != nil {
		k.t.Fatal(err)
	}
	if res.GetFenceEpoch() != epoch || res.GetAdmitted() != admitted {
		k.t.Fatalf("fence: %v", res)
	}
}

func (k *kit) sessionReady(n *node, inFlight ...*commonv1.TaskInFlight) *lifecyclev1.SessionReady {
	k.t.Helper()
	join, err := k.keys.Sign(joinstate.State{
		NodeID: n.id, NodeInstanceID: n.instance, Generation: n.generation,
		Serial: "01",
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return &lifecyclev1.SessionReady{
		NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation, JoinState: join,
		LedgerId: n.ledger, TasksInFlight: inFlight,
	}
}

// ready opens the node's next session and raises the gate to it.
func (k *kit) ready(n *node, inFlight ...*commonv1.TaskInFlight) *lifecyclev1.SessionReadyResult {
	k.t.Helper()
	n.generation++
	n.session = ids.New()
	res, err := k.gates.SessionsReady(k.t.Context(), &lifecyclev1.SessionsReadyRequest{
		ReplicaId: ids.New(), Sessions: []*lifecyclev1.SessionReady{k.sessionReady(n, inFlight...)},
	})
	if err != nil {
		k.t.Fatal(err)
	}
	if one := res.GetResults()[0]; !one.GetAccepted() {
		k.t.Fatalf("session refused: %v", one.GetDenial())
	}
	return res.GetResults()[0]
}

func (k *kit) enqueue(n *node, change ...func(*task.Spec)) task.Row {
	k.t.Helper()
	spec := task.Spec{
		Type: noop, NodeID: n.id, IdempotencyKey: ids.New(), Payload: &nodev1.ProbeNoop{Nonce: "n"},
		StartWithin: time.Minute,
	}
	for _, c := range change {
		c(&spec)
	}
	var row task.Row
	err := pg.InTx(k.t.Context(), k.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		row, err = task.Enqueue(ctx, tx, spec)
		return err
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return row
}

func (k *kit) leaseOf(n *node) *lifecyclev1.LeaseTasksResponse {
	k.t.Helper()
	res, err := k.tasks.LeaseTasks(k.t.Context(), &lifecyclev1.LeaseTasksRequest{
		Nodes: []*lifecyclev1.NodeLease{{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 32}},
	})
	if err != nil {
		k.t.Fatal(err)
	}
	return res
}

// lease wants exactly one task and returns the attempt that was offered.
func (k *kit) lease(n *node) *nodev1.TaskRef {
	k.t.Helper()
	res := k.leaseOf(n)
	if len(res.GetTasks()) != 1 {
		k.t.Fatalf("leased %d tasks, refused %v", len(res.GetTasks()), res.GetRefused())
	}
	return res.GetTasks()[0].GetTask()
}

func (k *kit) report(n *node, fill func(*lifecyclev1.NodeReport)) *lifecyclev1.NodeReportResult {
	k.t.Helper()
	r := &lifecyclev1.NodeReport{
		NodeId: n.id, NodeInstanceId: n.instance, SessionId: n.session, Generation: n.generation,
		LedgerId: n.ledger,
	}
	fill(r)
	res, err := k.tasks.ReportTasks(k.t.Context(), &lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{r}})
	if err != nil {
		k.t.Fatal(err)
	}
	return res.GetResults()[0]
}

func (k *kit) delivered(n *node, refs ...*nodev1.TaskRef) {
	k.t.Helper()
	k.report(n, func(r *lifecyclev1.NodeReport) { r.Delivered = refs })
}

func (k *kit) started(n *node, ref *nodev1.TaskRef) {
	k.t.Helper()
	k.report(n, func(r *lifecyclev1.NodeReport) { r.Started = []*nodev1.TaskStarted{{Task: ref}} })
}

// result reports an end and returns whether it was acknowledged.
func (k *kit) result(n *node, ref *nodev1.TaskRef, state commonv1.TaskState) bool {
	k.t.Helper()
	res := k.report(n, func(r *lifecyclev1.NodeReport) {
		r.Results = []*nodev1.TaskResult{{Task: ref, State: state, Output: []byte("out")}}
	})
	return slices.ContainsFunc(res.GetAcknowledged(), func(a *nodev1.TaskRef) bool {
		return a.GetTaskId() == ref.GetTaskId() && a.GetAttempt() == ref.GetAttempt()
	})
}

// stored has columns of a task's row and of the rows that belong to it.
type stored struct {
	State   commonv1.TaskState
	Attempt int32
	Late    int
	Version int64
	Error   string
	Output  string
	StateAt time.Time
}

func (k *kit) row(taskID string) stored {
	k.t.Helper()
	var s stored
	var state string
	err := k.pool.QueryRow(k.t.Context(),
		`SELECT t.state, t.attempt, (SELECT count(*) FROM lifecycle.late_evidence e
			WHERE e.task_id = t.task_id), t.version, t.error,
		encode(t.output, 'escape'), t.state_at FROM lifecycle.task t WHERE t.task_id = $1`, taskID).
		Scan(&state, &s.Attempt, &s.Late, &s.Version, &s.Error, &s.Output, &s.StateAt)
	if err != nil {
		k.t.Fatal(err)
	}
	if s.State, err = names.Parse[commonv1.TaskState](state); err != nil {
		k.t.Fatal(err)
	}
	return s
}

func (k *kit) wants(taskID string, state commonv1.TaskState, attempt int32, late int) {
	k.t.Helper()
	if s := k.row(taskID); s.State != state || s.Attempt != attempt || s.Late != late {
		k.t.Fatalf("task is %s, attempt %d, late evidence %d; want %s, %d, %d", names.Of(s.State), s.Attempt, s.Late,
			names.Of(state), attempt, late)
	}
}

// history lists the states of a task's transitions.
func (k *kit) history(taskID string) []string {
	k.t.Helper()
	var out []string
	for _, tr := range k.transitions(taskID) {
		out = append(out, names.Of(tr.GetState()))
	}
	return out
}

// transitions lists the transitions of a task as its events report them, and checks that their versions have no hole.
func (k *kit) transitions(taskID string) []*lifecyclev1.TaskTransition {
	k.t.Helper()
	var out []*lifecyclev1.TaskTransition
	for n, e := range testkit.Events(k.t, k.pool, `kind = 'task.changed' AND aggregate_id = $1`, taskID) {
		var changed lifecyclev1.TaskChanged
		if err := e.Decode(&changed); err != nil {
			k.t.Fatal(err)
		}
		if version := e.AggregateVersion; version != int64(n+1) || changed.GetTask().GetVersion() != version {
			k.t.Errorf("event %d has version %d, its row %d", n+1, version, changed.GetTask().GetVersion())
		}
		out = append(out, changed.GetTransitions()...)
	}
	return out
}

func (k *kit) wantHistory(taskID string, want ...string) {
	k.t.Helper()
	if got := k.history(taskID); !slices.Equal(got, want) {
		k.t.Errorf("history %v, want %v", got, want)
	}
}

func (k *kit) wakes() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.woken)
}

func inFlight(ref *nodev1.TaskRef, state commonv1.TaskState) *commonv1.TaskInFlight {
	return &commonv1.TaskInFlight{TaskId: ref.GetTaskId(), Attempt: ref.GetAttempt(), State: state}
}

func ofRun(run string) func(*task.Spec) {
	return func(s *task.Spec) { s.RunID, s.IdempotencyKey = run, fmt.Sprintf("%s/1/do/%s", run, ids.New()) }
}

func ofType(kind commonv1.TaskType) func(*task.Spec) { return func(s *task.Spec) { s.Type = kind } }
