package dispatch_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// trips counts what a pool sends and waits for.
type trips struct{ sent atomic.Int64 }

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.sent.Add(1)
	return ctx
}

func (*trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	c.sent.Add(1)
	return ctx
}

func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// counted gives the kit a pool whose round trips are counted.
func (k *kit) counted() *trips {
	k.t.Helper()
	config, err := pgxpool.ParseConfig(k.db.URL(pg.RoleLifecycle))
	if err != nil {
		k.t.Fatal(err)
	}
	c := &trips{}
	config.ConnConfig.Tracer = c
	config.ConnConfig.RuntimeParams[pg.FormatSetting] = pg.Format
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(testkit.Context(k.t), config)
	if err != nil {
		k.t.Fatal(err)
	}
	k.t.Cleanup(pool.Close)
	k.pool = pool
	k.hub = dispatch.NewHub(testkit.Logger(k.t), pool, k.signal)
	k.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(k.t), DB: pool, Key: k.key, Hub: k.hub, Committed: func() {},
		Wake: func(context.Context, pgx.Tx, ...string) error { return nil },
	})
	return c
}

// TestATaskTakesSixRoundTrips checks that queueing, lease and report take two round trips each: one that changes the
// row, under the node's gate, and one that appends the event and commits.
func TestATaskTakesSixRoundTrips(t *testing.T) {
	k := newKit(t)
	n := k.node()
	c := k.counted()
	took := func(what string, do func()) {
		t.Helper()
		before := c.sent.Load()
		do()
		if sent := c.sent.Load() - before; sent != 2 {
			t.Errorf("%s takes %d round trips", what, sent)
		}
	}
	var id string
	took("queueing", func() { id = k.enqueue(n).TaskID })
	var ref *nodev1.TaskRef
	took("the lease", func() { ref = k.lease(n) })
	took("the report", func() {
		if !k.result(n, ref, succeeded) {
			t.Error("the result is not acknowledged")
		}
	})
	k.wants(id, succeeded, 1, 0)
}

// TestALeaseThatWaitedForAFenceFindsTheGateShut checks that the statement behind the lock in the same round trip reads
// the gate as the fence left it, and not as it was when the round trip began.
func TestALeaseThatWaitedForAFenceFindsTheGateShut(t *testing.T) {
	k := newKit(t)
	n := k.node()
	id := k.enqueue(n).TaskID
	ctx := testkit.Context(t)
	fence, err := k.pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer fence.Rollback(context.WithoutCancel(ctx)) // it is committed below
	if _, err := fence.Exec(ctx, `UPDATE lifecycle.node_gate SET admitted = false, fence_epoch = 2, version = version + 1
		WHERE node_id = $1`, n.id); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		res *lifecyclev1.LeaseTasksResponse
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		res, err := k.tasks.LeaseTasks(ctx, &lifecyclev1.LeaseTasksRequest{
			Nodes: []*lifecyclev1.NodeLease{{NodeId: n.id, SessionId: n.session, Generation: n.generation, MaxTasks: 1}},
		})
		answered <- answer{res, err}
	}()
	testkit.Eventually(t, testkit.Patience, func() error { return k.waiting(ctx) })
	if err := fence.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	got := <-answered
	if got.err != nil || len(got.res.GetTasks()) != 0 || len(got.res.GetRefused()) != 1 {
		t.Fatalf("leased %v, %v", got.res, got.err)
	}
	k.wants(id, queued, 0, 0)
	// The views are those of the locked gates, also if the transaction is tried again.
	var briefs gate.Views
	if err := pg.InTx(ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		briefs, err = gate.LockForWork(ctx, tx, []string{n.id})
		return err
	}); err != nil || len(briefs) != 1 || briefs[n.id].Admitted {
		t.Errorf("briefs %v, %v", briefs, err)
	}
}

// TestAQueuedTaskIsReturnedAsItIsStored: queueing returns the row without having read it.
func TestAQueuedTaskIsReturnedAsItIsStored(t *testing.T) {
	k := newKit(t)
	n := k.node()
	for _, row := range []task.Row{
		k.enqueue(n),
		k.enqueue(n, ofRun(ids.New()), ofType(restart), func(s *task.Spec) {
			s.WorkspaceID, s.TenantID, s.Epoch, s.OpSeq, s.CorrelationID, s.CreatedBy = ids.New(), ids.New(), 3, 7, "c", "by"
		}),
	} {
		var stored task.Row
		k.tx(func(ctx context.Context, tx pgx.Tx) error {
			var err error
			stored, err = task.ByKey(ctx, tx, row.IdemKey)
			return err
		})
		if diff := cmp.Diff(stored, row); diff != "" {
			t.Errorf("returned, not stored: %s", diff)
		}
	}
	t.Logf("%.0f allocations", testing.AllocsPerRun(200, func() { k.enqueue(n) }))
}
