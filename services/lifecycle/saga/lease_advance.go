package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func (c *Core) advanceAll(ctx context.Context, tx pgx.Tx, moves []*transition, buffer *runs.Buffer) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var steps []int32
	var phases []string
	var bumps []bool
	for _, mv := range moves {
		to := mv.next
		cols.add(mv, to.state(), runs.Doing(to.phase, mv.h.def.Steps[to.step].Name), to.keepError,
			c.stallAfter(mv.h.def, mv.h.step()))
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
		row, ok := found[mv.h.run.ID]
		if !ok {
			if mv.err = c.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		mv.to = leasedRun{def: mv.h.def, run: mv.h.run, paused: row.Paused}
		if err := c.copyAdvanced(ctx, tx, mv, row); err != nil {
			return err
		}
		advanced = append(advanced, &mv.to.run)
	}
	if err := c.drawRanges(ctx, tx, advanced); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err != nil {
			continue
		}
		to := &mv.to
		to.openIn()
		to.runLeft = noDeadline
		if to.run.DeadlineAt != nil {
			to.runLeft = to.run.DeadlineAt.Sub(to.attempt.StartedAt)
		}
		to.overdue = to.runLeft <= 0
		row := found[mv.h.run.ID]
		closed, err := c.closedAttempt(ctx, tx, mv, row.ClosedVersion, row.ClosedAt)
		if err != nil {
			return err
		}
		buffer.Attempt(&closed)
		buffer.Attempt(&to.attempt)
		buffer.Run(&to.run)
		if mv.next.phase == runs.Undo && mv.h.run.Phase == runs.Do {
			if err := buffer.Touch(ctx, tx, workspace.Change{
				ID: to.run.WorkspaceID, RunID: to.run.ID, Code: to.run.ErrorCode, Error: to.run.Error,
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyAdvanced updates the copy of a run to the row that the statement wrote. If the version shows that others have
// written the row too, the row is read again.
func (c *Core) copyAdvanced(ctx context.Context, tx pgx.Tx, mv *transition, row *advancedRow) error {
	run, to := &mv.to.run, mv.next
	if row.Version != run.Version+1 {
		now, err := runs.Get(ctx, tx, run.ID)
		*run = now
		return err
	}
	run.Step, run.Phase, run.State, run.WhyWaiting = to.step, to.phase, to.state(),
		runs.Doing(to.phase, mv.h.def.Steps[to.step].Name)
	run.Attempts, run.Losses, run.TriedSince = 0, 0, row.TriedSince
	run.Fence, run.Signal, run.Version, run.StuckReason = row.Fence, row.Signal, row.Version, row.Stuck
	run.OpSeq, run.OpLast, run.OpenAttempt, run.OpenSince = row.OpSeq, row.OpLast, 1, &row.OpenSince
	if to.keepError {
		copyError(run, mv)
	}
	return nil
}
