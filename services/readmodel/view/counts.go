package view

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// Counts are the sums of a status page.
type Counts struct {
	nodeCounts
	workspaceCounts
}

type nodeCounts struct {
	Nodes     int32 `db:"nodes"`
	Connected int32 `db:"connected"`
}

type workspaceCounts struct {
	Workspaces int32 `db:"workspaces"`
	Active     int32 `db:"active"`
	LiveRuns   int32 `db:"live_runs"`
}

var countNodes = pg.Define(pg.RoleReadmodel, "view.count_nodes", `
	SELECT count(*) AS nodes, count(*) FILTER (WHERE s.connected) AS connected FROM `+nodeFrom+`
	WHERE n.state <> 'retired' AND ($3::uuid IS NULL OR n.tenant_id = $3)`)

// countWorkspaces sums the counts that are kept for each tenant.
var countWorkspaces = pg.DefineDynamic(pg.RoleReadmodel, "view.count_workspaces", func(scoped bool) string {
	of := ""
	if scoped {
		of = ` WHERE c.tenant_id = $1`
	}
	return `
	SELECT COALESCE(sum(c.workspaces), 0)::int AS workspaces, COALESCE(sum(c.active), 0)::int AS active,
		COALESCE(sum(c.live_runs), 0)::int AS live_runs
	FROM readmodel.workspace_count c` + of
}, false, true)

// Counts returns the sums over the rows that the scope includes.
func (s *Snapshot) Counts(ctx context.Context) (Counts, error) {
	var c Counts
	var err error
	if c.nodeCounts, err = pg.One[nodeCounts](ctx, s.tx, countNodes, s.Now, BeatFresh, s.scope.Arg()); err != nil {
		return c, fmt.Errorf("count nodes: %w", err)
	}
	var args []any
	if !s.scope.Everything() {
		args = append(args, s.scope.Arg())
	}
	if c.workspaceCounts, err = pg.One[workspaceCounts](ctx, s.tx, countWorkspaces.For(!s.scope.Everything()),
		args...); err != nil {
		return c, fmt.Errorf("count workspaces: %w", err)
	}
	return c, nil
}
