// Package rollback stops lifecycle's operations while rollback mode is set. The database is then older than the agents'
// ledgers or the launch logs, and an instance, task or release that is started or ended on the strength of its rows may
// destroy work that the database has lost.
//
// Recovery owns the mode. This package only reads it, in the transaction of the caller's decision.
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

// Refusal returns the fault with which commands are refused while the mode is set.
func Refusal() error {
	return fault.New(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK,
		"rollback mode is set: the database is older than what nodes or placements remember",
		fault.Unmet("rollback mode is active"),
		fault.Remedy("look at `gpuaas rollback status`, follow docs/restore.md, then `gpuaas rollback accept --reason "+
			"TEXT`; ask again after that"))
}
