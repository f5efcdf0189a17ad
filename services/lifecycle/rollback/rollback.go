// Package rollback keeps lifecycle still while rollback mode is set: the database is older than what agents or launch logs remember, and whatever is
// launched, dispatched, released or ended on its word may destroy what it has forgotten.
//
// Recovery owns the mode. This package reads it, in the transaction of what is decided, and decides nothing else.
package rollback

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

var readMode = pg.Define(pg.RoleLifecycle, "lifecycle.read_rollback_mode", `SELECT mesh.rolled_back()`)

// Active reports whether the mode is set, as q sees it.
func Active(ctx context.Context, q pg.Querier) (bool, error) {
	active, err := pg.Value[bool](ctx, q, readMode)
	if err != nil {
		return false, fmt.Errorf("read rollback mode: %w", err)
	}
	return active, nil
}

// Refuse returns control_plane_rollback while the mode is set. q is the transaction in which the caller decides.
func Refuse(ctx context.Context, q pg.Querier) error {
	active, err := Active(ctx, q)
	if err != nil || !active {
		return err
	}
	return Refusal()
}

// Refusal is what a command is answered while the mode is set.
func Refusal() error {
	return fault.New(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK, "rollback mode is set: the database is older than what nodes or placements remember",
		fault.Unmet("rollback mode is active"),
		fault.Remedy("look at `gpuaas rollback status`, follow docs/restore.md, then `gpuaas rollback accept --reason TEXT`; ask again after that"))
}
