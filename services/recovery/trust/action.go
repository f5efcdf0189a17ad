package trust

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// beginRepair begins the recovery action of a mismatch, under the correlation id of its incident, or joins the open
// one. An action that has failed while the mismatch lasts is followed by another one.
func beginRepair(ctx context.Context, tx pgx.Tx, row *preflightRow, by string) error {
	_, err := actions.Begin(ctx, tx, actions.Beginning{
		Kind: actions.CARepair, Reason: commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS,
		Requester: by, CorrelationID: row.IncidentID, RejectedAt: *row.Since,
	})
	return err
}

// noteRepaired notes on the recovery action of a mismatch that a person has had the ingress trust a root. If none is
// open while there is a mismatch, because the one before has failed, it begins one. The action is over when a handshake
// proves it.
func noteRepaired(ctx context.Context, tx pgx.Tx, root, by string) error {
	row, err := pg.One[preflightRow](ctx, tx, lockRow) // it must not end meanwhile
	if err != nil {
		return fmt.Errorf("lock preflight: %w", err)
	}
	if row.State == stateMismatch && row.Since != nil {
		if err := beginRepair(ctx, tx, &row, by); err != nil {
			return err
		}
	}
	_, err = actions.Attempt(ctx, tx, "", actions.CARepair, "the ingress is sent the root "+root+" by "+by, true)
	return err
}
