package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
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

// ClaimSpec names a resource that a step is about to make.
type ClaimSpec struct {
	Kind   string // `slot`, `instance`, `storage`, ...
	Name   string // deterministic: the same for every attempt of the same epoch
	Scope  commonv1.ClaimScope
	NodeID string // of a node_local resource, if known
}

// Intent writes the claim of a resource that is about to be made, in a transaction of its own. It is called before the
// call that makes it. If a live claim of that kind and name exists already, this run adopts it for its own epoch;
// adopted is true then, and ConfirmedAt is nil if the claim was never confirmed.
//
//nolint:nonamedreturns // two values beside the error
func (e *Env) Intent(ctx context.Context, spec ClaimSpec) (claim Claim, adopted bool, err error) {
	err = e.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		claim, adopted, err = e.IntentTx(ctx, tx, spec)
		if err != nil {
			return err
		}
		return e.core.point(ctx, "intent.before_commit", e.place())
	})
	if err != nil {
		return Claim{}, false, fmt.Errorf("claim %s %s: %w", spec.Kind, spec.Name, err)
	}
	return claim, adopted, e.core.point(ctx, "intent.after_commit", e.place())
}

// IntentTx is Intent within a transaction of the step's own, for resources that are rows of this database.
func (e *Env) IntentTx(ctx context.Context, tx pgx.Tx, spec ClaimSpec) (Claim, bool, error) {
	if e.Direction != commonv1.Direction_DIRECTION_DO {
		return Claim{}, false, errors.New("only a Do may claim")
	}
	scope := spec.Scope
	if scope == commonv1.ClaimScope_CLAIM_SCOPE_UNSPECIFIED {
		scope = commonv1.ClaimScope_CLAIM_SCOPE_SHARED
	}
	c, err := pg.One[adoptedClaim](ctx, tx, writeIntent,
		ids.New(), e.WorkspaceID, e.TenantID, e.RunID, e.Step, spec.Kind, names.Of(scope), spec.Name, e.Epoch, spec.NodeID,
	)
	if err != nil {
		return Claim{}, false, fmt.Errorf("write intent: %w", err)
	}
	return c.Claim, c.Adopted, announceClaim(ctx, tx, &c.Claim)
}

// ConfirmTx confirms, within the rows of a Done, that the resource exists, and records its name at its owner
// (externalRef).
func (e *Env) ConfirmTx(ctx context.Context, tx pgx.Tx, claim Claim, externalRef string) error {
	return e.changeClaim(ctx, tx, "confirm", claim, setConfirmed, externalRef)
}

// Release records that the resource is confirmed gone.
func (e *Env) Release(ctx context.Context, claim Claim) error {
	return e.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error { return e.ReleaseTx(ctx, tx, claim) })
}

// ReleaseTx is Release within the rows of a Done.
func (e *Env) ReleaseTx(ctx context.Context, tx pgx.Tx, claim Claim) error {
	return e.changeClaim(ctx, tx, "release", claim, setReleased, nil)
}

// OrphanTx marks a claim as orphaned: the resource is not confirmed gone, and it was decided to go on without that. by
// is the operator or program that decided it, and reason why.
func (e *Env) OrphanTx(ctx context.Context, tx pgx.Tx, claim Claim, by, reason string) error {
	return e.changeClaim(ctx, tx, "orphan", claim, setOrphaned, []string{by, reason})
}

func (e *Env) changeClaim(ctx context.Context, tx pgx.Tx, verb string, claim Claim, set claimSetting, arg any) error {
	c, err := pg.One[Claim](ctx, tx, changeClaim.For(set), claim.ID, arg)
	if pg.IsNoRows(err) {
		return nil // released already
	}
	if err != nil {
		return fmt.Errorf("%s claim %s %s: %w", verb, claim.Kind, claim.Name, err)
	}
	return announceClaim(ctx, tx, &c)
}

// Claims returns the workspace's claims that are neither released nor orphaned, oldest first, of the given kinds or of
// all.
func (e *Env) Claims(ctx context.Context, kinds ...string) ([]Claim, error) {
	return LiveClaims(ctx, e.core.db, e.WorkspaceID, kinds...)
}

// LiveClaims returns a workspace's claims that are neither released nor orphaned, oldest first, of the given kinds or
// of all.
func LiveClaims(ctx context.Context, q pg.Querier, workspaceID string, kinds ...string) ([]Claim, error) {
	claims, err := pg.All[Claim](ctx, q, liveClaims, workspaceID, append([]string{}, kinds...))
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	return claims, nil
}

// ReleaseOrphans releases the orphaned claims of one epoch of a workspace, of the given kinds, whose resources are
// confirmed gone; why records how that is known.
func ReleaseOrphans(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64, why string,
	kinds ...string,
) error {
	return reviseOrphans(ctx, tx, reapOfEpoch, why, workspaceID, epoch, kinds)
}

// ReleaseOrphan releases one orphaned claim whose resource is confirmed gone; why records how that is known.
func ReleaseOrphan(ctx context.Context, tx pgx.Tx, claimID, why string) error {
	return reviseOrphans(ctx, tx, reapOne, why, claimID)
}

// ReadoptOrphans makes the orphaned claims of one epoch live again, so that they are undone once more. A claim stays
// orphaned if a live claim, or a later orphan, of the workspace has the same kind and name.
func ReadoptOrphans(ctx context.Context, tx pgx.Tx, workspaceID string, epoch int64) error {
	return reviseOrphans(ctx, tx, readoptOfEpoch, workspaceID, epoch)
}

func reviseOrphans(ctx context.Context, tx pgx.Tx, change orphanChange, args ...any) error {
	changed, err := pg.All[Claim](ctx, tx, changeOrphans.For(change), args...)
	if err != nil {
		return fmt.Errorf("change orphan claims: %w", err)
	}
	var j eventBuffer
	for i := range changed {
		j.claim(&changed[i])
	}
	return j.flush(ctx, tx)
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
