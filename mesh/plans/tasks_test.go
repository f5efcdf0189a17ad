package plans_test

import (
	"slices"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// statement returns a statement of the product by its name.
func statement(t *testing.T, name string) *pg.Statement {
	t.Helper()
	all := pg.Statements()
	at := slices.IndexFunc(all, func(s *pg.Statement) bool { return s.Name() == name })
	if at < 0 {
		t.Fatalf("there is no statement %s", name)
	}
	return all[at]
}

// TestWhatIsReadOfEachMachineIsBoundByMachines checks that what is read of each machine is bounded by machines, of
// which a fleet of instances has as many as workspaces.
func TestWhatIsReadOfEachMachineIsBoundByMachines(t *testing.T) {
	s := statement(t, "gate.read_nodes_without_key")
	for size, want := range map[plans.Size]int64{
		{Nodes: 3000, Workspaces: 30000}: 7000, {Nodes: 3000, Workspaces: 3000, Instances: true}: 7000,
	} {
		if most := plans.Most(s, size, 1); most != want {
			t.Errorf("%d rows may be read of %+v, want %d", most, size, want)
		}
	}
}

// TestNodesWithWorkAreListedByNodeAndNotByTask: however many tasks wait for a node, to list it takes a few rows, and a
// page reads no more nodes than it may return.
func TestNodesWithWorkAreListedByNodeAndNotByTask(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	const nodes, tasks, page = 200, 100, 50
	for _, sql := range []string{
		`INSERT INTO lifecycle.node_gate (node_id, name, fence_epoch, admitted, session_epoch, session_open)
			SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 'n' || n, 1, true, 1, true
				FROM generate_series(1, 200) n`,
		`INSERT INTO lifecycle.task (task_id, type, node_id, state, idem_key, payload, expires_at)
			SELECT gen_random_uuid(), 'probe.noop', ('00000000-0000-7000-8000-' || lpad((n % 200 + 1)::text, 12, '0'))::uuid,
				'queued', n::text, '',
				mesh.clock() + interval '1 hour' FROM generate_series(1, 20000) n`,
	} {
		if _, err := db.Pool(pg.RoleLifecycle).Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := db.OwnerPool().Exec(ctx, `VACUUM ANALYZE lifecycle.task, lifecycle.node_gate`); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		limit, want string
		most        int64
	}{{limit: "50", most: 50}, {limit: "5000", most: nodes}} {
		literals := []string{tt.limit, "'00000000-0000-0000-0000-000000000000'"}
		cost, err := plans.Explain(ctx, db.Pool(pg.RoleLifecycle), statement(t, "dispatch.nodes_with_tasks"), literals)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%d nodes of %d with %d tasks: %d rows, %d buffers", cost.Returned, nodes, nodes*tasks, cost.Rows,
			cost.Buffers)
		if cost.Returned != tt.most || cost.Rows > 10*tt.most {
			t.Errorf("%d nodes with %d tasks take %d rows:\n%s", cost.Returned, nodes*tasks, cost.Rows, cost.Plan)
		}
	}
}
