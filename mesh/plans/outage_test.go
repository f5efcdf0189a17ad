package plans_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// TestTheFleetIsNotReadWhileNoReplicaListens: the watchdog, which scans every few seconds, reads no rows of a fleet at
// rest; none either while no replica of nodeapi listens, since a silent node is no evidence then; and the rows of
// workspaces that are not served while one listens.
func TestTheFleetIsNotReadWhileNoReplicaListens(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	admin, err := pgx.Connect(ctx, db.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(ctx)
	const workspaces = 2000
	exec := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	const replica = `'00000000-0000-7000-a000-000000000001'`
	exec(`SET session_replication_role = replica`) // triggers do not change the rows
	exec(`INSERT INTO mesh.replica (service, replica_id, started_at, beat_at, listening_since, version)
		VALUES ('nodeapi',
			` + replica + `, mesh.clock(), mesh.clock() + interval '1 hour', mesh.clock() - interval '1 hour', 1)`)
	exec(`INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
		run_id, node_id, placement, register_failures, last_error_code, last_error, served_by)
		SELECT ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, 1, '00000000-0000-7000-9000-000000000001',
			'acme', 'w' || n, 'active',
			mesh.clock(), 1, 'r', ('00000000-0000-7000-b000-' || lpad(n::text, 12, '0'))::uuid, 'static', 0, '', '',
				` + replica + `
		FROM generate_series(1, 2000) n`)
	exec(`INSERT INTO recovery.watch_session (session_id, version, node_id, generation, replica_id, serving, since,
		close_reason)
		SELECT w.workspace_id, 1, w.node_id, 1, w.served_by, true, mesh.clock(), '' FROM recovery.watch_workspace w`)
	exec(`VACUUM ANALYZE recovery.watch_workspace, recovery.watch_session, mesh.replica`)
	for _, tt := range []struct {
		name, sql      string
		returned, most int64
	}{
		{name: "at rest", sql: `SELECT`, most: 100},
		{
			name: "while no replica listens", most: 100,
			sql: `UPDATE mesh.replica SET beat_at = mesh.clock() - interval '1 hour'`,
		},
		{
			name: "while another replica listens", returned: workspaces, most: 10 * workspaces,
			sql: `INSERT INTO mesh.replica (service, replica_id, started_at, beat_at, listening_since, version)
				VALUES ('nodeapi', '00000000-0000-7000-a000-000000000002', mesh.clock(), mesh.clock() + interval '1 hour',
					mesh.clock(), 1)`,
		},
		{
			name: "while none serves any", returned: workspaces, most: 10 * workspaces,
			sql: `UPDATE recovery.watch_workspace SET served_by = NULL`,
		},
		{name: "while none serves any and no replica listens", most: 100, sql: `DELETE FROM mesh.replica`},
	} {
		exec(tt.sql)
		cost, err := plans.Explain(ctx, db.Pool(pg.RoleRecovery), statement(t, "watchdog.load_subjects"), nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d of %d workspaces, %d rows, %d buffers", tt.name, cost.Returned, workspaces, cost.Rows, cost.Buffers)
		if cost.Returned != tt.returned || cost.Rows > tt.most {
			t.Errorf("%s: %d workspaces are read with %d rows, want %d with %d at most", tt.name, cost.Returned, cost.Rows,
				tt.returned, tt.most)
		}
	}
}
