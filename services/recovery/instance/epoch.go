package instance

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// Epoch is a workspace's highest epoch and the instance that has it.
type Epoch struct {
	Number     int64  `db:"epoch"`
	InstanceID string `db:"instance_id" expr:"@.instance_id::text"`
}

// HighestEpoch returns the highest epoch of a workspace, without a lock on its row.
func HighestEpoch(ctx context.Context, q pg.Querier, workspaceID string) (Epoch, error) {
	highest, err := pg.One[Epoch](ctx, q, readEpoch, workspaceID)
	if err != nil {
		return Epoch{}, fmt.Errorf("read epoch of workspace: %w", err)
	}
	return highest, nil
}
