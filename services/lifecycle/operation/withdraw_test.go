package operation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// deadlocks keeps the statements that Postgres ended because of a deadlock. Those that run in a transaction are tried
// again, so that nothing else shows them.
type deadlocks struct {
	mu   sync.Mutex
	list []string
}

type statementKey struct{}

// TraceQueryStart keeps the statement for its end.
func (d *deadlocks) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, statementKey{}, data.SQL)
}

// TraceQueryEnd keeps the statement if it ended in a deadlock.
func (d *deadlocks) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	failure, ok := errors.AsType[*pgconn.PgError](data.Err)
	if !ok || failure.Code != "40P01" {
		return
	}
	sql, _ := ctx.Value(statementKey{}).(string)
	d.mu.Lock()
	d.list = append(d.list, sql)
	d.mu.Unlock()
}

func (d *deadlocks) none(t *testing.T) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.list) > 0 {
		t.Errorf("%d deadlocks, at %q", len(d.list), d.list)
	}
}

// traced returns a pool of the role lifecycle whose deadlocks are kept in d.
func (p *cluster) traced(d *deadlocks) *pgxpool.Pool {
	p.t.Helper()
	cfg, err := pgxpool.ParseConfig(p.db.URL(pg.RoleLifecycle))
	if err != nil {
		p.t.Fatal(err)
	}
	cfg.MaxConns, cfg.ConnConfig.Tracer = 4, d
	maps.Copy(cfg.ConnConfig.RuntimeParams, map[string]string{"timezone": "UTC", pg.WriterSetting: pg.WriterProduct})
	pool, err := pgxpool.NewWithConfig(p.t.Context(), cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(pool.Close)
	return pool
}

// blocked waits until a statement that contains text waits for a lock.
func (p *cluster) blocked(text string) {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		var found bool
		// A role sees the statements of its own sessions.
		err := p.db.Pool(pg.RoleLifecycle).QueryRow(p.t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND position($1 IN query) > 0)`, text).Scan(&found)
		if err == nil && !found {
			err = errors.New("none")
		}
		if err != nil {
			return fmt.Errorf("statements with %q that wait for a lock: %w", text, err)
		}
		return nil
	})
}

// asks begins a workspace and waits until its instance's agent, which takes no work, has been given the task of making
// the storage. It returns the operation and the node.
func (p *cluster) asks() (*lifecyclev1.Operation, string) {
	p.t.Helper()
	p.world.mu.Lock()
	p.world.mute = true
	p.world.mu.Unlock()
	res, err := p.seats[0].server.RequestOperation(p.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	op := res.GetOperation()
	var node string
	testkit.Eventually(p.t, testkit.Patience, func() error {
		err := p.db.OwnerPool().QueryRow(p.t.Context(), `
			SELECT t.node_id::text FROM lifecycle.task t JOIN lifecycle.saga_run r ON r.id = t.run_id
			WHERE t.run_id = $1 AND t.type = 'storage.allocate' AND r.owner IS NULL`, op.GetOperationId()).Scan(&node)
		if err != nil {
			return fmt.Errorf("the agent was not asked for storage: %w", err)
		}
		return nil
	})
	return op, node
}

// sessionOf returns the session that a node's gate names.
func (p *cluster) sessionOf(node string) string {
	p.t.Helper()
	var session string
	err := p.db.OwnerPool().QueryRow(p.t.Context(), `SELECT session_id::text FROM lifecycle.node_gate WHERE node_id = $1`,
		node).
		Scan(&session)
	if err != nil {
		p.t.Fatal(err)
	}
	return session
}

// leased leases the one task of a node for its session.
func (p *cluster) leased(node string) *lifecyclev1.LeasedTask {
	p.t.Helper()
	res, err := p.world.tasks.LeaseTasks(p.t.Context(), &lifecyclev1.LeaseTasksRequest{
		Nodes: []*lifecyclev1.NodeLease{{NodeId: node, SessionId: p.sessionOf(node), Generation: 1, MaxTasks: 8}},
	})
	if err != nil || len(res.GetTasks()) != 1 {
		p.t.Fatalf("leased %v, %v", res, err)
	}
	return res.GetTasks()[0]
}

// TestACancelMeetsAResult: the transaction of an agent's result has locked the task and waits for the run at the moment
// at which the run is cancelled and its tasks are withdrawn.
func TestACancelMeetsAResult(t *testing.T) {
	var seen deadlocks
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second, tracer: &seen})
	op, node := p.asks()
	leased := p.leased(node)
	atRun, goOn := make(chan struct{}), make(chan struct{})
	reached, free := sync.OnceFunc(func() { close(atRun) }), sync.OnceFunc(func() { close(goOn) })
	defer free()
	pool := p.traced(&seen)
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(testkit.Logger(t), pool, nil),
		Committed: func() {},
		Wake: func(ctx context.Context, tx pgx.Tx, runs ...string) error {
			reached()
			<-goOn
			return p.seats[0].core.Wake(ctx, tx, runs...)
		},
	})
	out, err := proto.Marshal(&nodev1.StorageAllocateOutput{Path: "/boxes/data"})
	if err != nil {
		t.Fatal(err)
	}
	var both sync.WaitGroup
	both.Go(func() {
		_, err := tasks.ReportTasks(t.Context(), &lifecyclev1.ReportTasksRequest{Reports: []*lifecyclev1.NodeReport{{
			NodeId: node, NodeInstanceId: ids.New(), SessionId: p.sessionOf(node), Generation: 1,
			Results: []*nodev1.TaskResult{{Task: leased.GetTask(), State: commonv1.TaskState_TASK_STATE_SUCCEEDED, Output: out}},
		}}})
		if err != nil {
			t.Errorf("the result was not taken: %v", err)
		}
	})
	<-atRun
	both.Go(func() {
		if _, err := p.seats[0].ask(t.Context(), kCancel, op.GetWorkspaceId()); err != nil {
			t.Errorf("the cancel was not taken: %v", err)
		}
	})
	// The transaction that withdraws the tasks waits for that of the result, which has locked one of them.
	p.blocked("dispatch.lock_open_of_run")
	free()
	both.Wait()
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.rests(op.GetWorkspaceId(), "failed")
	seen.none(t)
}

// TestACancelWithdrawsAtOnce: tasks of agents are withdrawn with the cancel, though the step under way does not heed
// the cancel.
func TestACancelWithdrawsAtOnce(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	op, node := p.asks()
	p.leased(node)
	// No driver reaches the database until the replica is thawed: tasks that are withdrawn now are withdrawn by the
	// cancel.
	thaw := p.seats[0].freeze()
	defer thaw()
	err := pg.InTx(t.Context(), p.db.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
		_, err := p.seats[0].core.Cancel(ctx, tx, op.GetOperationId(), "alice", "changed my mind")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	asked := `SELECT count(*) FROM lifecycle.task
		WHERE run_id = $1 AND type = 'storage.allocate' AND cancel_requested_at IS NOT NULL AND open`
	if n := p.count(asked, op.GetOperationId()); n != 1 {
		t.Errorf("%d tasks of the cancelled run are to stop, want 1", n)
	}
	thaw()
	p.world.mu.Lock()
	p.world.mute = false
	p.world.mu.Unlock()
	p.rests(op.GetWorkspaceId(), "failed")
}

// TestAnImageOnAMachineOfProcesses: an agent that cannot run a workload is not given it again: the step has failed for
// good, and the run is undone.
func TestAnImageOnAMachineOfProcesses(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.world.mu.Lock()
	p.world.refuse, p.world.reason = "storage.allocate", commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE
	p.world.mu.Unlock()
	res, err := p.seats[0].server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: byProcess},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := p.rests(res.GetOperation().GetWorkspaceId(), "failed")
	if w.LastErrorCode != "placement_unavailable" {
		t.Errorf("the workspace failed with %s: %s", w.LastErrorCode, w.LastError)
	}
	run, err := runs.Get(t.Context(), p.seats[0].pool, res.GetOperation().GetOperationId())
	if err != nil || run.ErrorCode != "placement_unavailable" {
		t.Errorf("the run failed with %s, %v", run.ErrorCode, err)
	}
	n := p.count(`SELECT count(*) FROM lifecycle.task WHERE run_id = $1 AND type = 'storage.allocate'`, run.ID)
	if n != 1 {
		t.Errorf("the agent was asked %d times, want once", n)
	}
}

// TestATeardownKeepsItsOwnTask: the run of a decommission is woken while the agent removes the workload. The step looks
// again, and the task goes on: it is not withdrawn and queued anew.
func TestATeardownKeepsItsOwnTask(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	node := p.machine("m1")
	id := p.create(p.tenant(), "demo", byStatic)
	p.mutes(true)
	p.world.turns(t)
	op, err := p.seats[0].ask(t.Context(), kDecommission, id)
	if err != nil {
		t.Fatal(err)
	}
	run := op.GetOperationId()
	p.parked(run, "Remove tenant workloads", "waiting for the agent to remove")
	p.leased(node)
	before := p.run(run).Version
	p.wake(id)
	testkit.Eventually(t, testkit.Patience, func() error {
		if r := p.run(run); r.State != "waiting" || r.Version < before+2 {
			return fmt.Errorf("it is %s in version %d, and was in %d", r.State, r.Version, before)
		}
		return nil
	})
	removals := `SELECT count(*) FROM lifecycle.task WHERE run_id = $1 AND type = 'workload.remove'`
	if n := p.count(removals+` AND cancel_requested_at IS NOT NULL`, run); n != 0 {
		t.Errorf("%d tasks of the step are to stop", n)
	}
	p.mutes(false)
	p.rests(id, "decommissioned")
	if n := p.count(removals, run); n != 1 {
		t.Errorf("the agent was asked %d times to remove the workload, want once", n)
	}
}
