package trust

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/actions"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

const (
	incidentKind = commonv1.IncidentKind_INCIDENT_KIND_ISSUER_UNTRUSTED
	layer        = commonv1.OwnerLayer_OWNER_LAYER_AUTH
	closedBy     = "recovery"
)

// incidentRow is the row of the incident of a mismatch.
type incidentRow struct {
	ID         string     `db:"incident_id" expr:"@.incident_id::text"`
	Summary    string     `db:"summary"`
	NextAction string     `db:"next_action"`
	OpenedAt   time.Time  `db:"opened_at"`
	LastSeenAt time.Time  `db:"last_seen_at"`
	ClosedAt   *time.Time `db:"closed_at"`
	ClosedBy   string     `db:"closed_by"`
	Count      int64      `db:"count"`
	Version    int64      `db:"version"`
}

// severity is that of its incidents.
var severity = fault.AlertOf(incidentKind).Severity

var (
	openIncident = pg.Define(pg.RoleRecovery, "trust.open_incident", `
		INSERT INTO recovery.incident AS i (incident_id, kind, key, severity, summary, node_ids, owner_layer, next_action,
			opened_at, last_seen_at)
		VALUES ($1, 'issuer_untrusted', 'ingress', $2, $3, '{}', $4, $5, mesh.clock(), mesh.clock())
		ON CONFLICT (kind, key) WHERE closed_at IS NULL DO UPDATE SET summary = EXCLUDED.summary,
			next_action = EXCLUDED.next_action, last_seen_at = EXCLUDED.last_seen_at, count = i.count + 1,
			version = i.version + 1
		RETURNING `+pg.Columns[incidentRow]("i"))

	endIncident = pg.Define(pg.RoleRecovery, "trust.end_incident", `
		UPDATE recovery.incident i SET closed_at = mesh.clock(), closed_by = $1, version = version + 1
		WHERE i.kind = 'issuer_untrusted' AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))
)

// raise opens the incident of a mismatch, or goes on with the open one, and returns its id.
func raise(ctx context.Context, tx pgx.Tx, row *preflightRow) (string, error) {
	i, err := pg.One[incidentRow](ctx, tx, openIncident, ids.New(), names.Of(severity), row.Summary, names.Of(layer),
		row.NextAction)
	if err != nil {
		return "", fmt.Errorf("open incident of the preflight: %w", err)
	}
	action := ""
	if i.Version == 1 {
		action = "incident.open"
	}
	return i.ID, i.report(ctx, tx, action)
}

// closeIncident closes the incident.
func closeIncident(ctx context.Context, tx pgx.Tx) error {
	i, err := pg.One[incidentRow](ctx, tx, endIncident, closedBy)
	if pg.IsNoRows(err) {
		return nil // a person has closed it
	}
	if err != nil {
		return fmt.Errorf("close incident of the preflight: %w", err)
	}
	return i.report(ctx, tx, "incident.close")
}

func (r *incidentRow) report(ctx context.Context, tx pgx.Tx, action string) error {
	return incident.Report(ctx, tx, &recoveryv1.Incident{
		IncidentId: r.ID, Kind: incidentKind, Severity: severity, Summary: r.Summary, OwnerLayer: layer,
		NextAction: r.NextAction, OpenedAt: timestamppb.New(r.OpenedAt), LastSeenAt: timestamppb.New(r.LastSeenAt),
		ClosedAt: incident.Stamp(r.ClosedAt), ClosedBy: r.ClosedBy, Count: r.Count, Version: r.Version,
	}, action, "")
}

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
