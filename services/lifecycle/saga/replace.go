package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// CancelParked ends a run that is parked at a step on its way forward: it is cancelled, and nothing is undone. Its
// claims stay for the run that is started in the same transaction, so that the workspace is never without a run and no
// other request can start one in between. No driver has a parked run leased, so that no step is under way; its fence is
// raised nevertheless. It returns a conflict if the run is no longer at that step, or is leased.
func (c *Core) CancelParked(ctx context.Context, tx pgx.Tx, runID, step, by, reason string) (Verb, error) {
	code, layer := names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED), names.Of(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	text := "cancelled by " + by + ": " + reason
	if err := c.withdrawTasks(ctx, tx, runID); err != nil {
		return Verb{}, err
	}
	r, err := pg.One[Run](ctx, tx, cancelParked, runID, step, by, reason, code, text, layer)
	if pg.IsNoRows(err) {
		return Verb{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the operation went on meanwhile")
	}
	if err != nil {
		return Verb{}, fmt.Errorf("cancel parked run: %w", err)
	}
	closed, err := attempts(ctx, tx, cancelOpenAttempts, r.ID, code, text, layer)
	if err != nil {
		return Verb{}, err
	}
	var j eventBuffer
	j.run(&r)
	for i := range closed {
		j.step(&closed[i])
	}
	j.decided(ctx, &r)
	pos, err := j.flushPos(ctx, tx)
	if err != nil {
		return Verb{}, err
	}
	c.stats.Failed.Add(1)
	return Verb{Run: r, Changed: true, Pos: pos}, nil
}
