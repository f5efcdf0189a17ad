package identity

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var nodesAfter = pg.Define(pg.RoleRecovery, "identity.nodes_after", `
	SELECT `+pg.Columns[storedRecord]("i")+` FROM recovery.identity i WHERE i.node_id > $1::uuid ORDER BY i.node_id
		LIMIT $2`)

// Announced returns the source that announces the nodes again.
func Announced() reannounce.Source {
	return reannounce.Source{
		Name: "nodes",
		Page: func(ctx context.Context, tx pgx.Tx, after string, most int) ([]events.Event, error) {
			list, err := readAll(ctx, tx, nodesAfter, after, most)
			if err != nil {
				return nil, err
			}
			out := make([]events.Event, len(list))
			for i, r := range list {
				if !r.Readable() {
					return nil, fmt.Errorf("node %s is in a state that this build does not know: %s", r.NodeID, r.unreadState)
				}
				out[i] = r.event()
			}
			return out, nil
		},
	}
}
