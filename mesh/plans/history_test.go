package plans_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// TestWorkspacesThatHaveEndedHaveTheirHistory: copies of a workspace that has ended stand beside those of the one that
// stands, with runs, events and their projections, over as many days as asked.
func TestWorkspacesThatHaveEndedHaveTheirHistory(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	tmpl := enrolled(t)
	size := plans.Size{Nodes: 10, Workspaces: 100, Ended: 50, Days: 10, Events: true}
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
		{"active workspaces", `SELECT count(*) FROM lifecycle.workspace WHERE state = 'active'`, 100},
		{"ended workspaces", `SELECT count(*) FROM lifecycle.workspace WHERE state = 'decommissioned'`, 50},
		{
			"finished runs of ended workspaces",
			`SELECT count(*) FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id
			WHERE w.state = 'decommissioned' AND r.finished_at IS NOT NULL`, 150,
		},
		{"runs of active workspaces", `SELECT count(*) FROM lifecycle.saga_run r
			JOIN lifecycle.workspace w ON w.id = r.workspace_id
			WHERE w.state = 'active'`, 100},
		{"workspaces that are shown", `SELECT count(*) FROM readmodel.workspace`, 150},
		{
			"ended workspaces with events",
			`SELECT count(DISTINCT w.id) FROM lifecycle.workspace w JOIN events.event e ON e.workspace_uuid = w.id
			WHERE w.state = 'decommissioned'`, 50,
		},
		{
			"allocations of ended workspaces that are not released",
			`SELECT count(*) FROM lifecycle.allocation a JOIN lifecycle.workspace w
			ON w.id = a.workspace_id WHERE w.state = 'decommissioned' AND a.state <> 'released'`, 0,
		},
	} {
		var n int
		if err := conn.QueryRow(ctx, tt.sql).Scan(&n); err != nil {
			t.Fatalf("%s: %v", tt.what, err)
		}
		if n != tt.want {
			t.Errorf("%d %s, not %d", n, tt.what, tt.want)
		}
	}
	var span time.Duration
	if err := conn.QueryRow(ctx, `SELECT max(finished_at) - min(finished_at) FROM lifecycle.saga_run r
		JOIN lifecycle.workspace w
		ON w.id = r.workspace_id WHERE w.state = 'decommissioned'`).Scan(&span); err != nil {
		t.Fatal(err)
	}
	if span < 9*24*time.Hour || span > 10*24*time.Hour {
		t.Errorf("the ends lie over %s, not nearly 10 days", span)
	}
}
