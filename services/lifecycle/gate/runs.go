package gate

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// listRuns adds the workspaces and epochs that may run on their nodes to the results of accepted sessions. After a boot
// an agent starts only those.
func listRuns(ctx context.Context, tx pgx.Tx, sessions []*lifecyclev1.SessionReady,
	results []*lifecyclev1.SessionReadyResult,
) error {
	var nodes []string
	for i, one := range results {
		if one.GetAccepted() {
			nodes = append(nodes, sessions[i].GetNodeId())
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	list, err := pg.All[mayRun](ctx, tx, listMayRun, nodes)
	if err != nil {
		return fmt.Errorf("list what may run: %w", err)
	}
	runs := map[string][]*nodev1.WorkspaceEpoch{}
	for _, r := range list {
		runs[r.NodeID] = append(runs[r.NodeID], &nodev1.WorkspaceEpoch{WorkspaceId: r.WorkspaceID, Epoch: r.Epoch})
	}
	for i, one := range results {
		if one.GetAccepted() {
			one.MayRun, one.RunListed = runs[sessions[i].GetNodeId()], true
		}
	}
	return nil
}
