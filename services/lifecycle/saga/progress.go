package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Progress records how far the attempt has come, as a text ("pods 2/3"). A text that differs from the last one resets
// the stall clock; the same text again writes nothing, because a step that reports the same state has not moved. The
// last text of an attempt that was lost with its driver counts as this attempt's last text. The stall flag of the run
// stays over the attempts of the step: only a text that differs from the last one of all of them clears it, so that an
// attempt which only gets as far as the one before leaves the flag.
func (e *Env) Progress(ctx context.Context, note string) error {
	dir := names.Of(e.Direction)
	// Only this driver writes this attempt's progress: the values read here are still current below, or the fence differs.
	last, err := pg.One[struct {
		Reported  bool `db:"reported"`    // by this attempt, as its last text
		NewOfTry  bool `db:"new_of_try"`  // it differs from the last text of the attempts that continue each other
		NewOfStep bool `db:"new_of_step"` // it differs from the last text of all attempts of the step
	}](ctx, e.core.db, readProgress, e.RunID, e.Fence, e.Step, dir, e.Attempt, note)
	switch {
	case pg.IsNoRows(err):
		return ErrFenced
	case err != nil:
		return fmt.Errorf("read progress: %w", err)
	case last.Reported:
		return nil
	}
	return pg.InTx(ctx, e.core.db, func(ctx context.Context, tx pgx.Tx) error {
		var buffer runs.Buffer
		r, err := pg.One[runs.Run](ctx, tx, progressRun, e.RunID, e.Fence, last.NewOfTry, last.NewOfStep)
		if pg.IsNoRows(err) {
			return ErrFenced
		}
		if err != nil {
			return fmt.Errorf("record progress: %w", err)
		}
		if err := runs.KeepOpen(ctx, tx, e.RunID); err != nil {
			return err
		}
		a, err := pg.One[runs.Attempt](ctx, tx, progressStep, e.RunID, e.Step, dir, e.Attempt, note, last.NewOfTry)
		if pg.IsNoRows(err) {
			return ErrFenced
		}
		if err != nil {
			return fmt.Errorf("record progress: %w", err)
		}
		buffer.Run(&r)
		buffer.Attempt(&a)
		return buffer.Flush(ctx, tx)
	})
}
