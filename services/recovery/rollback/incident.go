package rollback

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// subject is the key of the one incident, and the subject of the entries about the mode.
const subject = "mesh"

// incidentEvery is how often further evidence of the same things is counted on the incident.
const incidentEvery = time.Minute

// Short names.
const (
	incidentKind    = commonv1.IncidentKind_INCIDENT_KIND_CONTROL_PLANE_ROLLBACK
	layer           = commonv1.OwnerLayer_OWNER_LAYER_DATABASE
	nodeAhead       = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_NODE_AHEAD
	launchLogAhead  = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_AHEAD
	launchLogBehind = recoveryv1.RollbackEvidenceKind_ROLLBACK_EVIDENCE_KIND_LAUNCH_LOG_BEHIND
)

// NextAction is the instruction to operators in the incident and in the status.
const NextAction = "follow docs/restore.md: look at what was lost (`gpuaas rollback status`), then " +
	"`gpuaas rollback accept --reason TEXT`"

// incidentRow is the row of the mode's incident.
type incidentRow struct {
	ID         string     `db:"incident_id" expr:"@.incident_id::text"`
	Summary    string     `db:"summary"`
	Nodes      []string   `db:"node_ids"`
	NextAction string     `db:"next_action"`
	OpenedAt   time.Time  `db:"opened_at"`
	LastSeenAt time.Time  `db:"last_seen_at"`
	ClosedAt   *time.Time `db:"closed_at"`
	ClosedBy   string     `db:"closed_by"`
	Why        string     `db:"close_reason"`
	Count      int64      `db:"count"`
	Version    int64      `db:"version"`
}

// severity is that of its incidents.
var severity = fault.AlertOf(incidentKind).Severity

var (
	lockIncident = pg.Define(pg.RoleRecovery, "rollback.lock_incident", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i
			WHERE i.kind = $1 AND i.key = $2 AND i.closed_at IS NULL FOR UPDATE`)

	insertIncident = pg.Define(pg.RoleRecovery, "rollback.insert_incident", `
		INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, node_ids, owner_layer, next_action,
			opened_at, last_seen_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $9)`)

	updateIncident = pg.Define(pg.RoleRecovery, "rollback.update_incident", `
		UPDATE recovery.incident SET summary = $2, node_ids = $3, last_seen_at = $4, count = $5, version = $6
			WHERE incident_id = $1`)

	endIncident = pg.Define(pg.RoleRecovery, "rollback.close_incident", `
		UPDATE recovery.incident i SET closed_at = $3, closed_by = $4, close_reason = $5, version = version + 1
		WHERE i.kind = $1 AND i.key = $2 AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))
)

// readIncident runs a statement that returns the incident.
func readIncident(ctx context.Context, tx pgx.Tx, s *pg.Statement, args ...any) (*recoveryv1.Incident, error) {
	r, err := pg.One[incidentRow](ctx, tx, s, args...)
	if err != nil {
		return nil, err
	}
	return &recoveryv1.Incident{
		IncidentId: r.ID, Kind: incidentKind, Severity: severity, Summary: r.Summary, NodeIds: r.Nodes, OwnerLayer: layer,
		NextAction: r.NextAction, OpenedAt: timestamppb.New(r.OpenedAt), LastSeenAt: timestamppb.New(r.LastSeenAt),
		ClosedAt: incident.Stamp(r.ClosedAt), ClosedBy: r.ClosedBy, CloseReason: r.Why, Count: r.Count, Version: r.Version,
	}, nil
}

// report opens the mode's incident, or updates the open one. It sets the incident's id in mode, which the caller must
// save.
func report(ctx context.Context, tx pgx.Tx, mode *Mode, now time.Time) error {
	nodes := []string{}
	for _, s := range mode.evidence {
		if s.Kind == names.Of(nodeAhead) {
			nodes = append(nodes, s.Subject)
		}
	}
	i, err := readIncident(ctx, tx, lockIncident, names.Of(incidentKind), subject)
	switch {
	case pg.IsNoRows(err):
		return open(ctx, tx, mode, nodes, now)
	case err != nil:
		return fmt.Errorf("read incident of the rollback: %w", err)
	}
	mode.IncidentID = i.GetIncidentId()
	more := false
	for _, node := range nodes {
		if !slices.Contains(i.GetNodeIds(), node) && len(i.GetNodeIds()) < mostEvidence {
			i.NodeIds, more = append(i.NodeIds, node), true
		}
	}
	slices.Sort(i.GetNodeIds())
	if !more && i.GetSummary() == mode.summary() && now.Sub(i.GetLastSeenAt().AsTime()) < incidentEvery {
		return nil
	}
	i.Summary, i.LastSeenAt = mode.summary(), timestamppb.New(now)
	i.Count++
	i.Version++
	_, err = pg.Exec(ctx, tx, updateIncident, i.GetIncidentId(), i.GetSummary(), i.GetNodeIds(), now, i.GetCount(),
		i.GetVersion())
	if err != nil {
		return fmt.Errorf("go on with incident of the rollback: %w", err)
	}
	_, err = events.Append(ctx, tx, incident.Event(i))
	return err
}

func open(ctx context.Context, tx pgx.Tx, mode *Mode, nodes []string, now time.Time) error {
	slices.Sort(nodes)
	i := &recoveryv1.Incident{
		IncidentId: ids.New(), Kind: incidentKind, Severity: severity, Summary: mode.summary(), NodeIds: nodes,
		OwnerLayer: layer, NextAction: NextAction,
		OpenedAt: timestamppb.New(now), LastSeenAt: timestamppb.New(now), Count: 1, Version: 1,
	}
	_, err := pg.Exec(ctx, tx, insertIncident, i.GetIncidentId(), names.Of(incidentKind), subject, names.Of(severity),
		i.GetSummary(), nodes, names.Of(layer), NextAction, now)
	if err != nil {
		return fmt.Errorf("open incident of the rollback: %w", err)
	}
	mode.IncidentID = i.GetIncidentId()
	_, err = audit.Record(ctx, tx, incident.Entry(i, "incident.open", ""))
	if err != nil {
		return err
	}
	_, err = events.Append(ctx, tx, incident.Event(i))
	return err
}

// closeIncident closes the open incident and returns the position of its event; empty without one.
func closeIncident(ctx context.Context, tx pgx.Tx, by, reason string, now time.Time) (string, error) {
	i, err := readIncident(ctx, tx, endIncident, names.Of(incidentKind), subject, now, by, reason)
	if pg.IsNoRows(err) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("close incident of the rollback: %w", err)
	}
	_, err = audit.Record(ctx, tx, incident.Entry(i, "incident.close", by))
	if err != nil {
		return "", err
	}
	return events.Append(ctx, tx, incident.Event(i))
}
