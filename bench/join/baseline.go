package join

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
)

// The baseline is the round trips that every answer needs, as cheap as a client can make them: one command to Redis on
// a pooled connection, and one prepared statement to Postgres on a pooled connection, with no transaction around it.

func (r *server) rawSetNX(ctx context.Context, o asked) error {
	if err := r.redis.SetNX(ctx, "gpuaas:bench:"+o.workspaceID, ids.New(), 30*time.Second).Err(); err != nil {
		return fmt.Errorf("set at Redis: %w", err)
	}
	return nil
}

var stateOfRun = pg.Define(pg.RoleLifecycle, "join.state_of_run", `SELECT state FROM lifecycle.saga_run WHERE id = $1`)

func (r *server) rawRead(ctx context.Context, o asked) error {
	if _, err := pg.Value[string](ctx, r.pool, stateOfRun, o.runID); err != nil {
		return fmt.Errorf("read by primary key: %w", err)
	}
	return nil
}
