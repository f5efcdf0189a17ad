package operation

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// TestAResultMeetsTheEndOfRollbackMode: the transaction of an agent's result has locked a task and waits for its run at
// the moment at which the run goes on, and its tasks get their time back.
func TestAResultMeetsTheEndOfRollbackMode(t *testing.T) {
	var seen deadlocks
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	op, node := p.asks()
	leased := p.leased(node)
	thaw := p.seats[0].freeze() // the test alone lets the run go on
	defer thaw()
	pool := p.traced(&seen)
	if _, err := pool.Exec(t.Context(), `
		INSERT INTO lifecycle.run_pause (run_id, since) VALUES ($1, mesh.clock() - interval '1 minute')
		ON CONFLICT (run_id) DO UPDATE SET since = EXCLUDED.since`, op.GetOperationId()); err != nil {
		t.Fatal(err)
	}
	registry, err := p.seats[0].steps.Registry()
	if err != nil {
		t.Fatal(err)
	}
	core, err := saga.New(saga.Deps{
		DB: pool, Registry: registry, Logger: testkit.Logger(t), LockDeadlines: task.LockOfRuns,
		PostponeDeadlines: p.seats[0].steps.PostponeDeadlines,
	})
	if err != nil {
		t.Fatal(err)
	}
	atRun, goOn := make(chan struct{}), make(chan struct{})
	reached, free := sync.OnceFunc(func() { close(atRun) }), sync.OnceFunc(func() { close(goOn) })
	defer free()
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(testkit.Logger(t), pool, nil),
		Committed: func() {},
		Wake: func(ctx context.Context, tx pgx.Tx, runs ...string) error {
			reached()
			<-goOn
			return core.Wake(ctx, tx, runs...)
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
		if n, err := core.Resume(t.Context()); err != nil || n != 1 {
			t.Errorf("%d runs went on, %v; want one", n, err)
		}
	})
	p.blocked("lifecycle.task t")
	free()
	both.Wait()
	seen.none(t)
}
