package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// runsSQL reads which epochs may run on nodes: those whose allocation there is allocating or active. A launched
// instance serves the one epoch that its gate names; a machine serves whatever holds a slot on it.
const runsSQL = `
	SELECT a.node_id::text, a.workspace_id::text, a.epoch FROM lifecycle.allocation a
	WHERE a.node_id = ANY($1::uuid[]) AND a.slot IS NOT NULL AND a.state <> 'released' AND a.state IN ('allocating', 'active')
	UNION
	SELECT g.node_id::text, a.workspace_id::text, a.epoch
	FROM lifecycle.node_gate g JOIN lifecycle.allocation a ON a.workspace_id = g.workspace_id AND a.epoch = g.epoch
	WHERE g.node_id = ANY($1::uuid[]) AND g.instance_id IS NOT NULL AND a.state <> 'released' AND a.state IN ('allocating', 'active')
	ORDER BY 1, 2, 3`

// listRuns puts into the results of accepted sessions what may run on their nodes. An agent that starts after a boot
// starts nothing else.
func listRuns(ctx context.Context, tx pgx.Tx, sessions []*lifecyclev1.SessionReady, results []*lifecyclev1.SessionReadyResult) error {
	var nodes []string
	for i, one := range results {
		if one.GetAccepted() {
			nodes = append(nodes, sessions[i].GetNodeId())
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, runsSQL, nodes)
	if err != nil {
		return fmt.Errorf("list what may run: %w", err)
	}
	runs := map[string][]*nodev1.WorkspaceEpoch{}
	var node, workspace string
	var epoch int64
	_, err = pgx.ForEachRow(rows, []any{&node, &workspace, &epoch}, func() error {
		runs[node] = append(runs[node], &nodev1.WorkspaceEpoch{WorkspaceId: workspace, Epoch: epoch})
		return nil
	})
	if err != nil {
		return fmt.Errorf("list what may run: %w", err)
	}
	for i, one := range results {
		if one.GetAccepted() {
			one.MayRun, one.RunListed = runs[sessions[i].GetNodeId()], true
		}
	}
	return nil
}
