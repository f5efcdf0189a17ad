package gate

import (
	"context"

	"github.com/gpuaas/mesh/internal/pg"
)

var nodeIsReachable = pg.Define(pg.RoleLifecycle, "gate.node_is_reachable",
	`SELECT g.admitted AND `+ConnectedSQL+` FROM lifecycle.node_gate g WHERE g.node_id = $1`)

// Reachable reports whether the node has a session at a live replica of nodeapi.
func Reachable(ctx context.Context, q pg.Querier, nodeID string) bool {
	ok, err := pg.Value[bool](ctx, q, nodeIsReachable, nodeID)
	return err == nil && ok
}
