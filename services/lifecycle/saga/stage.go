package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Enter records that the step goes on in a stage. The stage stays in the attempt's row while the attempt is parked and
// once it has ended or its driver is lost, and is Env.Stage when the step is called again, by this attempt or a later
// one. Unlike Progress, it leaves the stall clock alone. A stage that was recorded already is not written again.
func (e *Env) Enter(ctx context.Context, stage string) error {
	if e.entered == stage {
		return nil
	}
	return e.TxInto(ctx, stage, nil)
}

// TxInto is Tx, and enters a stage in the same transaction: fn writes the rows that the stage builds on. fn may be nil.
func (e *Env) TxInto(ctx context.Context, stage string, fn TxFunc) error {
	err := e.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		// The row of the attempt is locked first: it comes with the run's in the order of locks.
		if e.entered != stage {
			if err := e.enterTx(ctx, tx, stage); err != nil {
				return err
			}
		}
		if fn == nil {
			return nil
		}
		return fn(ctx, tx)
	})
	if err == nil {
		e.entered = stage
	}
	return err
}

var enterStage = pg.Define(pg.RoleLifecycle, "saga.enter_stage", `
		UPDATE lifecycle.saga_step s SET stage = $5, version = s.version + 1
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state = 'running'
		RETURNING `+runs.AttemptColumns)

// enterTx writes the stage to the row of the attempt, in a transaction that holds the run's row.
func (e *Env) enterTx(ctx context.Context, tx pgx.Tx, stage string) error {
	if err := runs.KeepOpen(ctx, tx, e.RunID); err != nil {
		return err
	}
	a, err := pg.One[runs.Attempt](ctx, tx, enterStage, e.RunID, e.Step, names.Of(e.Direction), e.Attempt, stage)
	if pg.IsNoRows(err) {
		return ErrFenced
	}
	if err != nil {
		return fmt.Errorf("enter stage %s: %w", stage, err)
	}
	var buffer runs.Buffer
	buffer.Attempt(&a)
	return buffer.Flush(ctx, tx)
}
