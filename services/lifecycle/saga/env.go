package saga

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Env is the argument of a step's function. A write through Env fails with ErrFenced once the driver has lost the
// lease.
type Env struct {
	RunID         string
	WorkspaceID   string
	TenantID      string
	CorrelationID string
	Requester     string
	Kind          commonv1.OperationKind // of the run
	Round         int
	Step          int
	StepName      string
	Direction     commonv1.Direction
	Attempt       int   // from 1, of this step in this direction
	Epoch         int64 // of the workspace, for this run
	OpSeq         int64 // of this attempt; goes with Epoch into every command to a resource
	Fence         int64
	// IdempotencyKey is run/step/direction: the same in every attempt.
	IdempotencyKey string
	// Input is the input with which the run was started or last amended.
	Input json.RawMessage
	// Stage is the stage that this attempt has entered last, or else an earlier attempt of this step in this direction:
	// where the step may go on. It proves nothing about what exists. Empty if none was entered.
	Stage string

	core    *Core
	outputs map[string]json.RawMessage
	entered string // the stage in the row of this attempt
}

// Env returns the argument of the function of the step at which run r is: a is its open attempt, former the stage that
// earlier attempts have entered last, and outputs are those of earlier steps. outputs is not changed afterwards.
func (c *Core) Env(r *runs.Run, a *runs.Attempt, former string, outputs map[string]json.RawMessage) *Env {
	return &Env{
		RunID: r.ID, WorkspaceID: r.WorkspaceID, TenantID: r.TenantID, CorrelationID: r.CorrelationID,
		Requester: r.Requester, Kind: r.OperationKind(), Round: r.Round,
		Step: r.Step, StepName: a.Name, Direction: r.Direction(),
		Attempt: a.Attempt, Epoch: r.Epoch, OpSeq: a.OpSeq, Fence: r.Fence,
		IdempotencyKey: a.IdemKey, Input: r.Input, Stage: cmp.Or(a.Stage, former),
		core:    c,
		outputs: outputs,
		entered: a.Stage,
	}
}

// Output unmarshals the output of an earlier step of this run into v, and returns false if that step has left none.
func (e *Env) Output(step string, v any) (bool, error) {
	raw, ok := e.outputs[step]
	if !ok || len(raw) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("read output of step %q: %w", step, err)
	}
	return true, nil
}

// Tx runs fn in a transaction that holds the run's row: it commits only while this driver has the lease. fn may run
// more than once, and locks only rows that come after a run's in the order of locks.
func (e *Env) Tx(ctx context.Context, fn TxFunc) error {
	return e.TxAfter(ctx, nil, fn)
}

// TxAfter is Tx with locks that come before the run's in the order of locks, which are those of gates and tasks: before
// takes them, then the run's row is locked and the lease confirmed, and then fn runs. What before writes is rolled back
// if the lease is lost. Either function may be nil.
func (e *Env) TxAfter(ctx context.Context, before, fn TxFunc) error {
	return pg.InTx(ctx, e.core.db, func(ctx context.Context, tx pgx.Tx) error {
		if before != nil {
			if err := before(ctx, tx); err != nil {
				return err
			}
		}
		if err := e.confirmLease(ctx, tx); err != nil || fn == nil {
			return err
		}
		return fn(ctx, tx)
	})
}

// Proceed confirms that the step may go on to an effect outside of this database: that its driver has the lease, and
// that rollback mode is not set. A step calls it right before it launches, ends or removes anything.
func (e *Env) Proceed(ctx context.Context) error {
	return e.Tx(ctx, func(context.Context, pgx.Tx) error { return nil })
}

// confirmLease locks the run's row against the next lease, and confirms that this attempt's driver has it and that
// rollback mode is not set.
func (e *Env) confirmLease(ctx context.Context, tx pgx.Tx) error {
	// Comparing the fence alone would let an abandoned step write for a run that has parked or ended since: such a run
	// keeps its fence.
	run, err := pg.One[struct {
		Leased     bool `db:"leased"`
		RolledBack bool `db:"rolled_back"`
	}](ctx, tx, lockLeasedRun, e.RunID, e.Fence, e.Step, names.Of(e.Direction))
	if err != nil {
		return fmt.Errorf("lock run %s: %w", e.RunID, err)
	}
	if !run.Leased {
		e.core.stats.FencedOut.Add(1)
		return ErrFenced
	}
	if run.RolledBack {
		return ErrPaused
	}
	return nil
}
