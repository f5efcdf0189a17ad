package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
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

	core    *Core
	outputs map[string]json.RawMessage
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
		if err := e.hold(ctx, tx); err != nil || fn == nil {
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

// hold locks the run's row against the next lease, and confirms that this attempt's driver has it and that rollback
// mode is not set.
func (e *Env) hold(ctx context.Context, tx pgx.Tx) error {
	var mine, still bool
	// Comparing the fence alone would let an abandoned step write for a run that has parked or ended since: such a run
	// keeps its fence.
	err := pg.QueryRow(ctx, tx, holdRun, e.RunID, e.Fence, e.Step, names.Of(e.Direction)).Scan(&mine, &still)
	if err != nil {
		return fmt.Errorf("hold run %s: %w", e.RunID, err)
	}
	if !mine {
		e.core.stats.FencedOut.Add(1)
		return ErrFenced
	}
	if still {
		return ErrPaused
	}
	return nil
}

// Progress records how far the attempt has come, as a text ("pods 2/3"). A text that differs from the last one resets
// the stall clock; the same text again writes nothing, because a step that reports the same state has not moved. The
// last text of an attempt that was lost with its driver counts as this attempt's last text. The stall flag of the run
// stays over the attempts of the step: only a text that differs from the last one of all of them clears it, so that an
// attempt which only gets as far as the one before leaves the flag.
func (e *Env) Progress(ctx context.Context, note string) error {
	dir := names.Of(e.Direction)
	var said, moved, news bool
	// Only this driver writes this attempt's progress: the values read here are still current below, or the fence differs.
	err := pg.QueryRow(ctx, e.core.db, readProgress,
		e.RunID, e.Fence, e.Step, dir, e.Attempt, note).Scan(&said, &moved, &news)
	switch {
	case pg.IsNoRows(err):
		return ErrFenced
	case err != nil:
		return fmt.Errorf("read progress: %w", err)
	case said:
		return nil
	}
	return pg.InTx(ctx, e.core.db, func(ctx context.Context, tx pgx.Tx) error {
		var j eventBuffer
		r, err := pg.One[Run](ctx, tx, progressRun, e.RunID, e.Fence, moved, news)
		if pg.IsNoRows(err) {
			return ErrFenced
		}
		if err != nil {
			return fmt.Errorf("record progress: %w", err)
		}
		if err := pg.Queue(ctx, tx, keepOpen, []string{e.RunID}); err != nil {
			return fmt.Errorf("keep attempt: %w", err)
		}
		a, err := pg.One[Attempt](ctx, tx, progressStep, e.RunID, e.Step, dir, e.Attempt, note, moved)
		if pg.IsNoRows(err) {
			return ErrFenced
		}
		if err != nil {
			return fmt.Errorf("record progress: %w", err)
		}
		j.run(&r)
		j.step(&a)
		return j.flush(ctx, tx)
	})
}

// Intent writes the claim of a resource that is about to be made, in a transaction of its own. It is called before the
// call that makes it. If a live claim of that kind and name exists already, this run adopts it for its own epoch;
// adopted is true then, and ConfirmedAt is nil if the claim was never confirmed.
//
//nolint:nonamedreturns // two values beside the error
func (e *Env) Intent(ctx context.Context, spec claims.Spec) (claim claims.Claim, adopted bool, err error) {
	err = e.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		claim, adopted, err = e.IntentTx(ctx, tx, spec)
		if err != nil {
			return err
		}
		return e.core.point(ctx, "intent.before_commit", e.place())
	})
	if err != nil {
		return claims.Claim{}, false, fmt.Errorf("claim %s %s: %w", spec.Kind, spec.Name, err)
	}
	return claim, adopted, e.core.point(ctx, "intent.after_commit", e.place())
}

// IntentTx is Intent within a transaction of the step's own, for resources that are rows of this database.
func (e *Env) IntentTx(ctx context.Context, tx pgx.Tx, spec claims.Spec) (claims.Claim, bool, error) {
	if e.Direction != commonv1.Direction_DIRECTION_DO {
		return claims.Claim{}, false, errors.New("only a Do may claim")
	}
	return claims.Intend(ctx, tx, claims.Holder{
		WorkspaceID: e.WorkspaceID, TenantID: e.TenantID, RunID: e.RunID, Step: e.Step, Epoch: e.Epoch,
	}, spec)
}

// ConfirmTx confirms, within the rows of a Done, that the resource exists, and records its name at its owner
// (externalRef).
func (e *Env) ConfirmTx(ctx context.Context, tx pgx.Tx, claim claims.Claim, externalRef string) error {
	return claims.Confirm(ctx, tx, claim, externalRef)
}

// Release records that the resource is confirmed gone.
func (e *Env) Release(ctx context.Context, claim claims.Claim) error {
	return e.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error { return e.ReleaseTx(ctx, tx, claim) })
}

// ReleaseTx is Release within the rows of a Done.
func (e *Env) ReleaseTx(ctx context.Context, tx pgx.Tx, claim claims.Claim) error {
	return claims.Release(ctx, tx, claim)
}

// OrphanTx marks a claim as orphaned: the resource is not confirmed gone, and it was decided to go on without that. by
// is the operator or program that decided it, and reason why.
func (e *Env) OrphanTx(ctx context.Context, tx pgx.Tx, claim claims.Claim, by, reason string) error {
	return claims.Orphan(ctx, tx, claim, by, reason)
}

// Claims returns the workspace's claims that are neither released nor orphaned, oldest first, of the given kinds or of
// all.
func (e *Env) Claims(ctx context.Context, kinds ...string) ([]claims.Claim, error) {
	return claims.Live(ctx, e.core.db, e.WorkspaceID, kinds...)
}

func (e *Env) place() Place {
	return Place{RunID: e.RunID, Step: e.Step, Direction: names.Of(e.Direction)}
}

// Place is where a run is when it passes a kill point.
type Place struct {
	RunID     string
	Step      int
	Direction string
}

// point passes the kill point lifecycle.saga.<name>.
func (c *Core) point(ctx context.Context, name string, at Place) error {
	if c.onPoint != nil {
		if err := c.onPoint(ctx, name, at); err != nil {
			return err
		}
	}
	return failpoint.Hit("lifecycle.saga." + name)
}
