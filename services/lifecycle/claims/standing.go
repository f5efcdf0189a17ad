package claims

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Standing is a claim whose resource is known to exist, with the resource's name at its owner.
type Standing struct {
	ClaimID     string `db:"claim_id"`
	ExternalRef string `db:"external_ref"`
}

var confirmStanding = pg.Define(pg.RoleLifecycle, "claims.confirm_standing", `UPDATE lifecycle.resource_claim c
	SET confirmed_at = mesh.clock(), last_seen_at = mesh.clock(), version = c.version + 1,
		external_ref = CASE WHEN s.ref <> '' THEN s.ref ELSE c.external_ref END
	FROM unnest($1::uuid[], $2::text[]) AS s (id, ref)
	WHERE c.id = s.id AND c.confirmed_at IS NULL AND c.released_at IS NULL AND c.orphaned_at IS NULL RETURNING `+columns)

// ConfirmStanding confirms claims whose resources are known to exist, in place of the step that made them, and returns
// how many it confirmed. Claims that are confirmed, released or orphaned by now stay as they are.
func ConfirmStanding(ctx context.Context, tx pgx.Tx, standing []Standing) (int, error) {
	claims, refs := make([]string, len(standing)), make([]string, len(standing))
	for i, s := range standing {
		claims[i], refs[i] = s.ClaimID, s.ExternalRef
	}
	confirmed, err := pg.All[Claim](ctx, tx, confirmStanding, claims, refs)
	if err != nil {
		return 0, fmt.Errorf("confirm claims: %w", err)
	}
	return len(confirmed), announce(ctx, tx, confirmed...)
}
