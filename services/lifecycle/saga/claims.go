package saga

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

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
		return e.core.Point(ctx, "intent.before_commit", e.place())
	})
	if err != nil {
		return claims.Claim{}, false, fmt.Errorf("claim %s %s: %w", spec.Kind, spec.Name, err)
	}
	return claim, adopted, e.core.Point(ctx, "intent.after_commit", e.place())
}

// IntentTx is Intent within a transaction of the step's own, for resources that are rows of this database.
func (e *Env) IntentTx(ctx context.Context, tx pgx.Tx, spec claims.Spec) (claims.Claim, bool, error) {
	if e.Direction != commonv1.Direction_DIRECTION_DO {
		return claims.Claim{}, false, errors.New("only a Do may claim")
	}
	return claims.Intend(ctx, tx, claims.Claimant{
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
