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
// claims stay for the run that is started in the same transaction, so that the workspace never stands without one and
// nobody can come between. No driver holds a parked run, so nothing of it is under way; its fence is raised all the
// same. A run that is elsewhere by now, or in a driver's hands, is a conflict.
func (c *Core) CancelParked(ctx context.Context, tx pgx.Tx, runID, step, by, reason string) (Verb, error) {
	code, layer := names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED), names.Of(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	text := "cancelled by " + by + ": " + reason
	if err := c.withdrawTasks(ctx, tx, runID); err != nil {
		return Verb{}, err
	}
	r := &Run{}
	err := tx.QueryRow(ctx, `UPDATE lifecycle.saga_run r SET seal = NULL, state = 'failed', fence = mesh.next(r.fence),
			cancel_requested_at = mesh.clock(), cancel_by = $3, cancel_reason = $4, error_code = $5, error = $6,
			error_layer = $7, error_step = r.step, stuck_reason = '', why_waiting = '', finished_at = mesh.clock(),
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'waiting' AND r.owner IS NULL AND r.phase = 'do'
			AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
		RETURNING `+runColumns, runID, step, by, reason, code, text, layer).Scan(r.targets()...)
	if pg.IsNoRows(err) {
		return Verb{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the operation went on meanwhile")
	}
	if err != nil {
		return Verb{}, fmt.Errorf("cancel parked run: %w", err)
	}
	closed, err := attempts(ctx, tx, `UPDATE lifecycle.saga_step s SET state = 'cancelled', outcome = 'cancelled',
			finished_at = mesh.clock(), why_waiting = '', error_code = $2, error = $3, error_layer = $4, version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+stepColumns, r.ID, code, text, layer)
	if err != nil {
		return Verb{}, err
	}
	var j journal
	j.run(r)
	for i := range closed {
		j.step(&closed[i])
	}
	j.decided(ctx, r)
	pos, err := j.flushPos(ctx, tx)
	if err != nil {
		return Verb{}, err
	}
	c.stats.Failed.Add(1)
	c.asked.add(r.ID)
	return Verb{Run: *r, Changed: true, Pos: pos}, nil
}
