package allocation

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

// claimBatch bounds the claims that are confirmed in one transaction.
const claimBatch = 256

// ClaimConfirmer confirms the claims on slots and identities that earlier builds left `intended` although their
// resources stand. Claims that this build makes are confirmed by the step that makes the resource.
type ClaimConfirmer struct {
	Logger *slog.Logger
	DB     *pgxpool.Pool
	// Committed is called after each commit that wrote events.
	Committed func()
}

// Sweep confirms every such claim and returns how many there were. A slot stands with the allocation of its epoch, an
// identity with the instance that it was prepared for: the instance is launched only after recovery has prepared its
// identity.
func (c *ClaimConfirmer) Sweep(ctx context.Context) (int, error) {
	total := 0
	for {
		confirmed := 0
		err := pg.InTx(ctx, c.DB, func(ctx context.Context, tx pgx.Tx) error {
			confirmed = 0
			standing, err := standingClaims(ctx, tx)
			if err != nil || len(standing) == 0 {
				return err
			}
			confirmed, err = claims.ConfirmStanding(ctx, tx, standing)
			return err
		})
		if err != nil {
			return total, fmt.Errorf("confirm claims of earlier builds: %w", err)
		}
		if confirmed == 0 {
			return total, nil
		}
		c.Committed()
		c.Logger.InfoContext(ctx, "claims of earlier builds confirmed", slog.Int("claims", confirmed))
		total += confirmed
	}
}

var standingUnconfirmed = pg.Define(pg.RoleLifecycle, "allocation.standing_unconfirmed", `
		SELECT c.id::text AS claim_id, coalesce(a.allocation_id::text, i.node_id::text, '') AS external_ref
		FROM lifecycle.resource_claim c
		LEFT JOIN lifecycle.allocation a ON c.kind = $1 AND a.workspace_id = c.workspace_id AND a.epoch = c.epoch
			AND a.state <> 'released'
		LEFT JOIN lifecycle.instance i ON c.kind = $2 AND i.workspace_id = c.workspace_id AND i.epoch = c.epoch
			AND i.instance_id::text = c.deterministic_name AND i.state IN ('launching', 'live', 'ending')
		WHERE c.confirmed_at IS NULL AND c.released_at IS NULL AND c.orphaned_at IS NULL AND c.kind IN ($1, $2)
			AND (a.allocation_id IS NOT NULL OR i.instance_id IS NOT NULL)
		ORDER BY c.id LIMIT $3 FOR NO KEY UPDATE OF c SKIP LOCKED`)

// standingClaims locks claims that are not confirmed and whose resource stands. A claim that an operation is changing
// is left to that operation.
func standingClaims(ctx context.Context, tx pgx.Tx) ([]claims.Standing, error) {
	standing, err := pg.All[claims.Standing](ctx, tx, standingUnconfirmed, KindSlot, KindIdentity, claimBatch)
	if err != nil {
		return nil, fmt.Errorf("list claims that are not confirmed: %w", err)
	}
	return standing, nil
}
