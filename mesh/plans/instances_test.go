package plans_test

import (
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/plans"
)

// TestEachWorkspaceOfAFleetOfInstancesHasAMachineOfItsOwn checks every table that has rows of an instance, and also
// after a history.
func TestEachWorkspaceOfAFleetOfInstancesHasAMachineOfItsOwn(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	tmpl, err := plans.Make(ctx, plans.Source{
		Agent: filepath.Join(meshtest.Programs(t), agents.Program), Version: "test", Ended: true, Instances: true,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := tmpl.Load(ctx, db.AdminURL(), plans.Size{Nodes: 10, Workspaces: 100, Instances: true}); err == nil {
		t.Error("10 machines were loaded for 100 instances")
	}
	size := plans.Size{Nodes: 100, Workspaces: 100, Ended: 50, Days: 10, Events: true, Instances: true}
	if err := tmpl.Load(ctx, db.AdminURL(), size); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(ctx, db.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	for _, tt := range []struct {
		what, sql string
		want      int
	}{
		{
			"active workspaces with a machine of their own",
			`SELECT count(DISTINCT node_id) FROM lifecycle.workspace WHERE state = 'active'`, 100,
		},
		{"live instances", `SELECT count(*) FROM lifecycle.instance i
			JOIN lifecycle.workspace w ON w.id = i.workspace_id AND w.node_id = i.node_id
			WHERE i.state = 'live' AND w.state = 'active' AND i.placement = 'process'`, 100},
		{"gates of live instances", `SELECT count(*) FROM lifecycle.node_gate g
			JOIN lifecycle.instance i ON i.instance_id = g.instance_id
			WHERE i.state = 'live' AND g.admitted AND g.session_open`, 100},
		{
			"active identities with a name of their own",
			`SELECT count(DISTINCT name) FROM recovery.identity WHERE state = 'active'`, 100,
		},
		{"names of machines that are not those of their instances", `SELECT count(*) FROM recovery.identity d
			JOIN lifecycle.instance i ON i.node_id = d.node_id
			WHERE d.name <> 'box-' || right(i.workspace_id::text, 12) || '-' || i.epoch`, 0},
		{"instances that have ended", `SELECT count(*) FROM lifecycle.instance i
			JOIN lifecycle.workspace w ON w.id = i.workspace_id
			WHERE w.state = 'decommissioned' AND i.state = 'ended'`, 100},
		{"serials of their own", `SELECT count(DISTINCT s.serial) FROM recovery.serial s
			JOIN recovery.identity d ON d.node_id = s.node_id
			WHERE d.state = 'active'`, 100},
		{"machines that are shown", `SELECT count(*) FROM readmodel.node n
			JOIN lifecycle.instance i ON i.node_id = n.node_id AND i.state = 'live'`, 100},
	} {
		var n int
		if err := conn.QueryRow(ctx, tt.sql).Scan(&n); err != nil {
			t.Errorf("%s: %v", tt.what, err)
			continue
		}
		if n != tt.want {
			t.Errorf("%d %s, not %d", n, tt.what, tt.want)
		}
	}
}
