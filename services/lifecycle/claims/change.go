package claims

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// Spec names a resource that a step is about to make.
type Spec struct {
	Kind   string // `slot`, `instance`, `storage`, ...
	Name   string // deterministic: the same for every attempt of the same epoch
	Scope  commonv1.ClaimScope
	NodeID string // of a node_local resource, if known
}

// Claimant is the step of a run that claims a resource.
type Claimant struct {
	WorkspaceID, TenantID, RunID string
	Step                         int
	Epoch                        int64
}

// adoptedClaim is a claim that Intend wrote, and whether it existed before. Postgres sets xmax of a row that the
// statement has updated to the transaction's id, and leaves it zero in a row that it has inserted.
type adoptedClaim struct {
	Claim
	Adopted bool `db:"adopted" expr:"@.xmax <> 0"`
}

var writeIntent = pg.Define(pg.RoleLifecycle, "claims.intend", `
		INSERT INTO lifecycle.resource_claim AS c
			(id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name, epoch, node_id)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, NULLIF($10, '')::uuid)
		ON CONFLICT (workspace_id, kind, deterministic_name) WHERE released_at IS NULL AND orphaned_at IS NULL
		DO UPDATE SET run_id = EXCLUDED.run_id, step = EXCLUDED.step, epoch = GREATEST(c.epoch, EXCLUDED.epoch),
			node_id = COALESCE(EXCLUDED.node_id, c.node_id), version = c.version + 1
		RETURNING `+pg.Columns[adoptedClaim]("c"))

// Intend writes the claim of a resource that is about to be made. If a live claim of that kind and name exists already,
// the claimant takes it over, and Intend returns true; its ConfirmedAt is nil if the resource was never confirmed.
func Intend(ctx context.Context, tx pgx.Tx, by Claimant, spec Spec) (Claim, bool, error) {
	scope := cmp.Or(spec.Scope, commonv1.ClaimScope_CLAIM_SCOPE_SHARED)
	c, err := pg.One[adoptedClaim](ctx, tx, writeIntent,
		ids.New(), by.WorkspaceID, by.TenantID, by.RunID, by.Step, spec.Kind, names.Of(scope), spec.Name, by.Epoch,
		spec.NodeID,
	)
	if err != nil {
		return Claim{}, false, fmt.Errorf("write intent: %w", err)
	}
	return c.Claim, c.Adopted, announce(ctx, tx, c.Claim)
}

// setting is the SET list of a change of a claim. Its argument is $2.
type setting string

const (
	setConfirmed setting = `confirmed_at = COALESCE(c.confirmed_at, mesh.clock()), last_seen_at = mesh.clock(),
		external_ref = CASE WHEN $2 <> '' THEN $2 ELSE c.external_ref END`
	setReleased setting = `released_at = COALESCE(c.released_at, mesh.clock()),
		last_seen_at = COALESCE($2::text::timestamptz, c.last_seen_at)`
	setOrphaned setting = `orphaned_at = COALESCE(c.orphaned_at, mesh.clock()),
		orphaned_by = ($2::text[])[1], orphan_reason = ($2::text[])[2]`
)

var changeClaim = pg.DefineDynamic(pg.RoleLifecycle, "claims.change", func(s setting) string {
	return `UPDATE lifecycle.resource_claim c SET ` + string(s) + `, version = c.version + 1
			WHERE c.id = $1 AND c.released_at IS NULL RETURNING ` + columns
}, setConfirmed, setReleased, setOrphaned)

// Confirm records that the resource exists, and its name at its owner. A claim that is released stays as it is, as with
// Release and Orphan.
func Confirm(ctx context.Context, tx pgx.Tx, c Claim, externalRef string) error {
	return change(ctx, tx, "confirm", c, setConfirmed, externalRef)
}

// Release records that the resource is confirmed gone.
func Release(ctx context.Context, tx pgx.Tx, c Claim) error {
	return change(ctx, tx, "release", c, setReleased, nil)
}

// Orphan records that the resource is not confirmed gone and that it was decided to go on without that; by is the
// operator or program that decided it, and reason why.
func Orphan(ctx context.Context, tx pgx.Tx, c Claim, by, reason string) error {
	return change(ctx, tx, "orphan", c, setOrphaned, []string{by, reason})
}

func change(ctx context.Context, tx pgx.Tx, verb string, claim Claim, set setting, arg any) error {
	c, err := pg.One[Claim](ctx, tx, changeClaim.For(set), claim.ID, arg)
	if pg.IsNoRows(err) {
		return nil // released already
	}
	if err != nil {
		return fmt.Errorf("%s claim %s %s: %w", verb, claim.Kind, claim.Name, err)
	}
	return announce(ctx, tx, c)
}
