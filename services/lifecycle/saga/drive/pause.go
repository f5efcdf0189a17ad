package drive

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// whyPaused returns the text that the timeline shows for a paused run.
func whyPaused() string {
	return names.Of(commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK) +
		": it stands still until `gpuaas rollback accept --reason TEXT`"
}

// pause parks the open attempt, forward or undoing, because rollback mode is set. No driver leases the run until Resume
// lets it go on: its deadlines do not run meanwhile, and no attempt is used up.
func (d *Driver) pause(ctx context.Context, h *lease.Run) error {
	state := runs.Waiting
	if h.Run.Phase == runs.Undo {
		state = runs.Compensating
	}
	runID := h.Run.ID
	err := d.submit(ctx, &transition{h: h, cl: closing{state: runs.AttemptWaiting, why: whyPaused()}, release: &release{
		state: state, attempts: h.Run.Attempts, why: whyPaused(), passOver: true, point: "park",
		rows: saga.Writes{Rows: []saga.TxFunc{func(ctx context.Context, tx pgx.Tx) error {
			_, err := pg.Exec(ctx, tx, pauseRun, runID)
			if err != nil {
				return fmt.Errorf("pause run: %w", err)
			}
			return nil
		}}},
	}})
	if err == nil {
		d.core.Stats().Paused.Add(1)
	}
	return err
}

// paused reports whether a step ended because rollback mode is set: the step found it itself, or a peer refused a
// request with that reason.
func paused(err error) bool {
	return errors.Is(err, saga.ErrPaused) || fault.Has(err, commonv1.Reason_REASON_CONTROL_PLANE_ROLLBACK)
}
