package drive

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/lease"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func (d *Driver) advanceAll(ctx context.Context, tx pgx.Tx, moves []*transition, buffer *runs.Buffer) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var steps []int32
	var phases []string
	var bumps []bool
	for _, mv := range moves {
		to := mv.attempt
		cols.add(mv, to.state(), runs.Doing(to.phase, mv.h.Def.Steps[to.step].Name), to.keepError,
			d.core.StallAfter(mv.h.Def, mv.h.Step()))
		// small counts
		steps, phases, bumps = append(steps, int32(to.step)), append(phases, to.phase), append(bumps, to.bumpFence)
	}
	rows, err := pg.All[advancedRow](ctx, tx, advanceRuns, cols.args(steps, phases, bumps)...)
	if err != nil {
		return fmt.Errorf("advance runs: %w", err)
	}
	found := make(map[string]*advancedRow, len(rows))
	for i := range rows {
		found[rows[i].ID] = &rows[i]
	}
	var advanced []*runs.Run
	for _, mv := range moves {
		row, ok := found[mv.h.Run.ID]
		if !ok {
			if mv.err = d.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		mv.to = lease.Run{Def: mv.h.Def, Run: mv.h.Run, Paused: row.Paused}
		if err := d.copyAdvanced(ctx, tx, mv, row); err != nil {
			return err
		}
		advanced = append(advanced, &mv.to.Run)
	}
	if err := lease.DrawRanges(ctx, tx, advanced); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err != nil {
			continue
		}
		to := &mv.to
		to.OpenNext()
		row := found[mv.h.Run.ID]
		closed, err := d.closedAttempt(ctx, tx, mv, row.ClosedVersion, row.ClosedAt)
		if err != nil {
			return err
		}
		buffer.Attempt(&closed)
		buffer.Attempt(&to.Attempt)
		buffer.Run(&to.Run)
		if mv.attempt.phase == runs.Undo && mv.h.Run.Phase == runs.Do {
			if err := buffer.Touch(ctx, tx, workspace.Change{
				ID: to.Run.WorkspaceID, RunID: to.Run.ID, Code: to.Run.ErrorCode, Error: to.Run.Error,
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyAdvanced updates the copy of a run to the row that the statement wrote. If the version shows that others have
// written the row too, the row is read again.
func (d *Driver) copyAdvanced(ctx context.Context, tx pgx.Tx, mv *transition, row *advancedRow) error {
	run, to := &mv.to.Run, mv.attempt
	if row.Version != run.Version+1 {
		now, err := runs.Get(ctx, tx, run.ID)
		*run = now
		return err
	}
	run.Step, run.Phase, run.State, run.WhyWaiting = to.step, to.phase, to.state(),
		runs.Doing(to.phase, mv.h.Def.Steps[to.step].Name)
	run.Attempts, run.Losses, run.TriedSince = 0, 0, row.TriedSince
	run.Fence, run.Signal, run.Version, run.StuckReason = row.Fence, row.Signal, row.Version, row.Stuck
	run.OpSeq, run.OpLast, run.OpenAttempt, run.OpenSince = row.OpSeq, row.OpLast, 1, &row.OpenSince
	if to.keepError {
		copyError(run, mv)
	}
	return nil
}
