package drive

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func (d *Driver) releaseRuns(ctx context.Context, tx pgx.Tx, moves []*transition, buffer *runs.Buffer) error {
	if len(moves) == 0 {
		return nil
	}
	var cols columns
	var wakeable []bool
	var tries []int32
	var signals []int64
	var after []float64
	var stuck []string
	for _, mv := range moves {
		to := mv.release
		cols.add(mv, to.state, to.why, to.keepError, d.core.StallAfter(mv.h.Def, mv.h.Step()))
		wakeable, tries = append(wakeable, to.wakeable), append(tries, int32(to.attempts)) // small counts
		signals, after = append(signals, mv.h.Run.Signal), append(after, to.after.Seconds())
		stuck = append(stuck, to.stuck)
	}
	rows, err := pg.All[releasedRow](ctx, tx, releaseLeases, cols.args(wakeable, tries, signals, after, stuck)...)
	if err != nil {
		return fmt.Errorf("release runs: %w", err)
	}
	found := make(map[string]*releasedRow, len(rows))
	for i := range rows {
		found[rows[i].ID] = &rows[i]
	}
	for _, mv := range moves {
		row, ok := found[mv.h.Run.ID]
		if !ok {
			if mv.err = d.whyMissed(ctx, tx, mv); mv.err != nil && !isMiss(mv.err) {
				return mv.err
			}
			continue
		}
		if err := d.copyReleased(ctx, tx, mv, row); err != nil {
			return err
		}
		closed, err := d.closedAttempt(ctx, tx, mv, row.ClosedVersion, row.ClosedAt)
		if err != nil {
			return err
		}
		buffer.Attempt(&closed)
		buffer.Run(&mv.runNow)
	}
	if err := d.touchWorkspaces(ctx, tx, moves, buffer); err != nil {
		return err
	}
	for _, mv := range moves {
		if mv.err == nil {
			buffer.Decided(ctx, &mv.runNow)
		}
	}
	return nil
}

// copyReleased is copyAdvanced for a run whose lease was given up.
func (d *Driver) copyReleased(ctx context.Context, tx pgx.Tx, mv *transition, row *releasedRow) error {
	run, to := mv.h.Run, mv.release
	if row.Version != run.Version+1 {
		now, err := runs.Get(ctx, tx, run.ID)
		mv.runNow = now
		return err
	}
	run.State, run.Owner, run.LeaseUntil, run.WhyWaiting = to.state, "", nil, to.why
	run.Attempts, run.Losses, run.NextAt, run.FinishedAt = to.attempts, 0, row.NextAt, row.Finished
	run.StuckReason, run.Version, run.OpenAttempt, run.OpenSince = row.Stuck, row.Version, 0, nil
	if to.keepError {
		copyError(&run, mv)
	}
	mv.runNow = run
	return nil
}

// touchWorkspaces sets the state of the workspaces of runs whose leases were given up.
func (d *Driver) touchWorkspaces(ctx context.Context, tx pgx.Tx, moves []*transition, buffer *runs.Buffer) error {
	var changes []workspace.Change
	for _, mv := range moves {
		if mv.err != nil || mv.release.workspace == "" {
			continue
		}
		code, text := mv.runNow.ErrorCode, mv.runNow.Error
		if mv.release.stuck != "" {
			code, text = "undo_exhausted", mv.release.stuck
		}
		changes = append(changes, workspace.Change{
			ID: mv.runNow.WorkspaceID, RunID: mv.runNow.ID, State: mv.release.workspace, Code: code, Error: text,
		})
	}
	if len(changes) == 0 {
		return nil
	}
	return buffer.Touch(ctx, tx, changes...)
}
