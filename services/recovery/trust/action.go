package trust

import (
	"context"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// beginRepair begins the recovery action of a mismatch, under the correlation id of its incident.
func beginRepair(ctx context.Context, tx pgx.Tx, row *preflightRow) error {
	_, err := actions.Begin(ctx, tx, actions.Beginning{
		Kind: actions.CARepair, Reason: commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS,
		Requester: closedBy, CorrelationID: row.IncidentID, RejectedAt: *row.Since,
	})
	return err
}

// noteRepaired notes on the recovery action of a mismatch, if one is open, that a person has had the ingress trust a
// root. The action is over when a handshake proves it.
func noteRepaired(ctx context.Context, tx pgx.Tx, root, by string) error {
	_, err := actions.Attempt(ctx, tx, "", actions.CARepair, "the ingress is sent the root "+root+" by "+by, true)
	return err
}
