package project_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

// trips counts the round trips of a connection, and the statements that they carry.
type trips struct{ sent, statements int }

func (c *trips) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.sent++
	c.statements++
	return ctx
}

func (*trips) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *trips) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	c.sent++
	c.statements += len(data.Batch.QueuedQueries)
	return ctx
}

func (*trips) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (*trips) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// countedProjector returns a projector that works over one connection, whose round trips are counted, and its pool.
func countedProjector(tb testing.TB, l *projecttest.Log) (*project.Projector, *trips, *pgxpool.Pool) {
	tb.Helper()
	config := l.DB.Pool(pg.RoleReadmodel).Config()
	counted := &trips{}
	config.ConnConfig.Tracer, config.MaxConns = counted, 1
	pool, err := pgxpool.NewWithConfig(testkit.Context(tb), config)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(pool.Close)
	p, err := project.New(project.Deps{
		Logger: testkit.Logger(tb), DB: pool, Numbered: l.Numbered, Wake: l.Wake,
	})
	if err != nil {
		tb.Fatal(err)
	}
	return p, counted, pool
}

// observation is what the agent of a node reports of a workspace.
func observation(workspaceID, nodeID string, version int64) events.Event {
	return events.Event{
		Kind: project.KindObservation, AggregateType: "observation", AggregateID: workspaceID, AggregateVersion: version,
		Payload:     &nodev1.Observation{WorkspaceId: workspaceID, Epoch: version},
		Correlation: events.Correlation{WorkspaceID: workspaceID, NodeID: nodeID},
	}
}

// TestObservationsThatWaitTogether checks that observations which are applied together, between changes of their
// workspaces, have the same effect as one by one: of each workspace the newest eight stay, and that of its own node.
func TestObservationsThatWaitTogether(t *testing.T) {
	testkit.IO(t)
	const workspaces, nodes, steps = 3, 12, 240
	draw := rand.New(rand.NewPCG(1, 2)) // each run draws the same
	var node [nodes]string
	for n := range node {
		node[n] = ids.New()
	}
	var list [workspaces]*lifecyclev1.Workspace
	for n := range list {
		list[n] = &lifecyclev1.Workspace{
			WorkspaceId: ids.New(), TenantId: ids.New(), Tenant: "alpha", Name: "w" + strconv.Itoa(n),
			State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		}
	}
	var puts []func(l *projecttest.Log)
	for n := range int64(steps) {
		w := list[draw.IntN(workspaces)]
		version := max(1, n-draw.Int64N(20)) // some come late
		if draw.IntN(8) == 0 {
			moved := &lifecyclev1.Workspace{
				WorkspaceId: w.GetWorkspaceId(), TenantId: w.GetTenantId(), Tenant: w.GetTenant(), Name: w.GetName(),
				State: w.GetState(), NodeId: node[draw.IntN(nodes)], Epoch: n,
			}
			puts = append(puts, func(l *projecttest.Log) { l.AppendVersion(moved, version) })
			continue
		}
		from := node[draw.IntN(nodes)]
		for range 1 + draw.IntN(2) {
			e := observation(w.GetWorkspaceId(), from, version)
			puts = append(puts, func(l *projecttest.Log) { l.AppendRaw(pg.RoleNodeAPI, e) })
			version++
		}
	}
	result := func(after func(l *projecttest.Log, p *project.Projector)) string {
		t.Helper()
		l := projecttest.New(t)
		p := l.Projector()
		for _, put := range puts {
			put(l)
			after(l, p)
		}
		l.Number()
		must(t, p.Drain(testkit.Context(t)))
		if report, err := p.Verify(testkit.Context(t)); err != nil || !report.Equal() {
			t.Fatalf("the rebuild differs: %+v, %v", report, err)
		}
		return text(t, l, `SELECT (SELECT string_agg(concat_ws(' ', o.workspace_id, o.node_id, o.version,
				o.body->>'epoch'), E'\n' ORDER BY o.workspace_id, o.node_id) FROM readmodel.observed o) || E'\n' ||
			(SELECT string_agg(concat_ws(' ', w.workspace_id, w.node_id, w.version), E'\n' ORDER BY w.workspace_id)
				FROM readmodel.workspace w)`)
	}
	single := result(func(l *projecttest.Log, p *project.Projector) {
		l.Number()
		must(t, p.Drain(testkit.Context(t)))
	})
	together := result(func(*projecttest.Log, *project.Projector) {})
	if single != together {
		t.Errorf("one by one\n%s\ntogether\n%s", single, together)
	}
	if got := strings.Count(together, "\n") + 1; got < workspaces*9 {
		t.Errorf("%d rows stay, want at least %d:\n%s", got, workspaces*9, together)
	}
}

// TestObservationsOfABatchTakeTheStatementsOfOne: 500 observations of as many workspaces, half of which have changed
// before, take as many round trips and statements as one.
func TestObservationsOfABatchTakeTheStatementsOfOne(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p, counted, _ := countedProjector(t, l)
	must(t, p.Drain(ctx)) // the cursor is there, and its statements are prepared
	node := ids.New()
	observe := func(count int) {
		t.Helper()
		var changes, observations []events.Event
		for n := range count {
			w := &lifecyclev1.Workspace{
				WorkspaceId: ids.New(), TenantId: ids.New(), Tenant: "alpha", Name: "w", NodeId: node,
				State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
			}
			if n%2 == 0 {
				changes = append(changes, events.Event{
					Kind: project.KindWorkspace, AggregateType: "workspace", AggregateID: w.GetWorkspaceId(), AggregateVersion: 1,
					Payload: w, Correlation: events.Correlation{WorkspaceID: w.GetWorkspaceId()},
				})
			}
			observations = append(observations, observation(w.GetWorkspaceId(), node, 1))
		}
		appendAll(ctx, t, l, pg.RoleLifecycle, changes...)
		appendAll(ctx, t, l, pg.RoleNodeAPI, observations...)
		l.Number()
	}
	apply := func() trips {
		t.Helper()
		before := *counted
		must(t, p.Drain(ctx))
		return trips{counted.sent - before.sent, counted.statements - before.statements}
	}
	observe(1)
	apply() // the statements are prepared
	observe(1)
	one := apply()
	observe(500)
	if got := apply(); got != one {
		t.Errorf("500 observations took %d round trips with %d statements, and one %d with %d", got.sent, got.statements,
			one.sent, one.statements)
	}
	if got := text(t, l, "SELECT count(*)::text FROM readmodel.observed"); got != "502" {
		t.Errorf("%s observations stand, want 502", got)
	}
}

// TestObservationsOfOneWorkspaceThatWaitWriteItsRowOnce: the physical position of the row in an empty table shows how
// many versions of it were written before.
func TestObservationsOfOneWorkspaceThatWaitWriteItsRowOnce(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	workspace, node := ids.New(), ids.New()
	var list []events.Event
	for n := range int64(500) {
		list = append(list, observation(workspace, node, n+1))
	}
	appendAll(ctx, t, l, pg.RoleNodeAPI, list...)
	l.Number()
	must(t, p.Drain(ctx))
	if got := text(t, l, "SELECT concat_ws(' ', version, body->>'epoch', ctid) FROM readmodel.observed"); got !=
		"500 500 (0,1)" {
		t.Errorf("version, epoch and position of the row are %q", got)
	}
}

// TestAnObservationThatIsRefusedIsParkedAlone: an observation without an id of its node does not keep those that waited
// with it from their effect.
func TestAnObservationThatIsRefusedIsParkedAlone(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	l := projecttest.New(t)
	p := l.Projector()
	var list []events.Event
	for n := range 20 {
		e := observation(ids.New(), ids.New(), 1)
		if n == 7 {
			e.NodeID = ""
		}
		list = append(list, e)
	}
	appendAll(ctx, t, l, pg.RoleNodeAPI, list...)
	l.Number()
	must(t, p.Drain(ctx))
	parked, err := p.Parked(ctx)
	must(t, err)
	if len(parked) != 1 {
		t.Errorf("%d events are parked, want one: %+v", len(parked), parked)
	}
	if got := text(t, l, "SELECT count(*)::text FROM readmodel.observed"); got != "19" {
		t.Errorf("%s observations stand, want 19", got)
	}
}

func appendAll(ctx context.Context, tb testing.TB, l *projecttest.Log, role string, list ...events.Event) {
	tb.Helper()
	err := pg.InTx(ctx, l.DB.Pool(role), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, list...)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
}

// BenchmarkObservations projects 500 observations of as many workspaces that waited together. An op is one batch;
// go-µs/event is the processor time of this process, and db-µs/event that of the server's process.
func BenchmarkObservations(b *testing.B) {
	testkit.IO(b)
	const count = 500
	l := projecttest.New(b)
	p, _, pool := countedProjector(b, l)
	var pid int
	if err := pool.QueryRow(b.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		b.Fatal(err)
	}
	var pair [count][2]string
	for n := range pair {
		pair[n] = [2]string{ids.New(), ids.New()}
	}
	var took, ours, server time.Duration
	version := int64(0)
	for b.Loop() {
		b.StopTimer()
		version++
		list := make([]events.Event, count)
		for n := range list {
			list[n] = observation(pair[n][0], pair[n][1], version)
		}
		appendAll(b.Context(), b, l, pg.RoleNodeAPI, list...)
		l.Number()
		began, goBefore, dbBefore := time.Now(), processor(b, os.Getpid()), processor(b, pid)
		b.StartTimer()
		if err := p.Drain(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		took += time.Since(began)
		ours += processor(b, os.Getpid()) - goBefore
		server += processor(b, pid) - dbBefore
		b.StartTimer()
	}
	per := float64(b.N*count) * float64(time.Microsecond)
	b.ReportMetric(float64(took)/per, "µs/event")
	b.ReportMetric(float64(ours)/per, "go-µs/event")
	b.ReportMetric(float64(server)/per, "db-µs/event")
}

// processor returns the processor time that the threads of a process have used so far.
func processor(b *testing.B, pid int) time.Duration {
	b.Helper()
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return 0 // only Linux has it
	}
	var sum int64
	for _, thread := range threads {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/schedstat", pid, thread.Name()))
		if err != nil {
			continue // a thread that has ended
		}
		ns, err := strconv.ParseInt(strings.Fields(string(raw))[0], 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		sum += ns
	}
	return time.Duration(sum)
}
