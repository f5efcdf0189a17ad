package watchdog

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

// Short names.
const (
	kindClass   = commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS
	kindBrake   = commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE
	kindChurn   = commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET
	kindMachine = commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE
)

// incidentEvery is how often an incident that goes on unchanged is counted and reported again.
const incidentEvery = time.Minute

// incident is a row of incident.
type incident struct {
	ID, Key                       string
	Kind                          commonv1.IncidentKind
	Severity                      commonv1.Severity
	Summary, Step, ErrorCode      string
	Tenants, Workspaces, Nodes    []string
	OwnerLayer                    commonv1.OwnerLayer
	NextAction                    string
	OpenedAt, LastSeenAt          time.Time
	ClosedAt                      *time.Time
	ClosedBy                      string
	Count, Version                int64
	layerText, kindText, severity string
}

const incidentColumns = `incident_id::text, kind, key, severity, summary, step, error_code, tenant_ids, workspace_ids, node_ids, owner_layer, next_action,
	opened_at, last_seen_at, closed_at, closed_by, count, version`

func scanIncident(row pgx.Row) (*incident, error) {
	i := &incident{}
	err := row.Scan(&i.ID, &i.kindText, &i.Key, &i.severity, &i.Summary, &i.Step, &i.ErrorCode, &i.Tenants, &i.Workspaces, &i.Nodes, &i.layerText,
		&i.NextAction, &i.OpenedAt, &i.LastSeenAt, &i.ClosedAt, &i.ClosedBy, &i.Count, &i.Version)
	if err != nil {
		return nil, err //nolint:wrapcheck // the caller says what it read
	}
	if i.Kind, err = names.Parse[commonv1.IncidentKind](i.kindText); err != nil {
		return nil, fmt.Errorf("read incident: %w", err)
	}
	if i.Severity, err = names.Parse[commonv1.Severity](i.severity); err != nil {
		return nil, fmt.Errorf("read incident: %w", err)
	}
	if i.layerText != "" {
		if i.OwnerLayer, err = names.Parse[commonv1.OwnerLayer](i.layerText); err != nil {
			return nil, fmt.Errorf("read incident: %w", err)
		}
	}
	return i, nil
}

// about adds who is concerned; empty ids are nobody's.
func (i *incident) about(tenant, workspace, node string) {
	add := func(list *[]string, id string) {
		if id != "" && !slices.Contains(*list, id) {
			*list = append(*list, id)
			slices.Sort(*list)
		}
	}
	add(&i.Tenants, tenant)
	add(&i.Workspaces, workspace)
	add(&i.Nodes, node)
}

// Proto is the incident as its event and the API show it.
func (i *incident) Proto() *recoveryv1.Incident {
	return &recoveryv1.Incident{
		IncidentId: i.ID, Kind: i.Kind, Severity: i.Severity, Summary: i.Summary, Step: i.Step, ErrorCode: i.ErrorCode, TenantIds: i.Tenants,
		WorkspaceIds: i.Workspaces, NodeIds: i.Nodes, OwnerLayer: i.OwnerLayer, NextAction: i.NextAction, OpenedAt: timestamppb.New(i.OpenedAt),
		LastSeenAt: timestamppb.New(i.LastSeenAt), ClosedAt: stamp(i.ClosedAt), ClosedBy: i.ClosedBy, Count: i.Count, Version: i.Version,
	}
}

func (i *incident) report(ctx context.Context, tx pgx.Tx) error {
	_, err := events.Append(ctx, tx, events.Event{
		Kind: "incident.changed", AggregateType: "incident", AggregateID: i.ID, AggregateVersion: i.Version, Payload: i.Proto(),
		Correlation: events.Correlation{CorrelationID: i.ID},
	})
	if err != nil || (i.Version > 1 && i.ClosedAt == nil) {
		return err //nolint:wrapcheck // it says what it did
	}
	e := audit.Entry{
		Action: "incident.open", Reason: i.Summary, SubjectType: "incident", SubjectID: i.ID, CorrelationID: i.ID,
		Details: map[string]any{"kind": i.Kind, "severity": i.Severity, "count": i.Count},
	}
	if i.ClosedAt != nil {
		e.Action = "incident.close"
		if i.ClosedBy != requesterName {
			e.Actor = i.ClosedBy
		}
	}
	_, err = audit.Record(ctx, tx, e)
	return err //nolint:wrapcheck // it says what it did
}

// openIncident reads the open one of a kind and key under its lock; nil if there is none.
func openIncident(ctx context.Context, tx pgx.Tx, kind commonv1.IncidentKind, key string) (*incident, error) {
	i, err := scanIncident(tx.QueryRow(ctx, `SELECT `+incidentColumns+` FROM recovery.incident WHERE kind = $1 AND key = $2 AND closed_at IS NULL FOR UPDATE`,
		names.Of(kind), key))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // there is none
	}
	if err != nil {
		return nil, fmt.Errorf("read incident: %w", err)
	}
	return i, nil
}

// raise opens an incident, or goes on with the open one of the same kind and key: whom it concerns is added to, and it is counted again at most each
// incidentEvery. i becomes what is stored.
func (j *judging) raise(ctx context.Context, i *incident) error {
	if i.LastSeenAt.IsZero() {
		i.LastSeenAt = j.now
	}
	was, err := openIncident(ctx, j.tx, i.Kind, i.Key)
	if err != nil {
		return err
	}
	if was == nil {
		i.ID, i.OpenedAt, i.Count, i.Version = ids.New(), j.now, max(i.Count, 1), 1
		_, err := j.tx.Exec(ctx, `INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, step, error_code, tenant_ids, workspace_ids, node_ids,
				owner_layer, next_action, opened_at, last_seen_at, count) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`,
			i.ID, names.Of(i.Kind), i.Key, names.Of(i.Severity), i.Summary, i.Step, i.ErrorCode, texts(i.Tenants), texts(i.Workspaces), texts(i.Nodes),
			layerName(i.OwnerLayer), i.NextAction, i.OpenedAt, i.LastSeenAt, i.Count)
		if err != nil {
			return fmt.Errorf("open incident: %w", err)
		}
		return i.report(ctx, j.tx)
	}
	return j.goOn(ctx, was, i)
}

// touch goes on with the open incident of a kind and key; without one it does nothing.
func (j *judging) touch(ctx context.Context, i *incident) error {
	was, err := openIncident(ctx, j.tx, i.Kind, i.Key)
	if err != nil || was == nil {
		return err
	}
	i.LastSeenAt, i.Summary = j.now, was.Summary
	return j.goOn(ctx, was, i)
}

func (j *judging) goOn(ctx context.Context, was, i *incident) error {
	more := false
	for _, l := range []struct{ was, add *[]string }{{&was.Tenants, &i.Tenants}, {&was.Workspaces, &i.Workspaces}, {&was.Nodes, &i.Nodes}} {
		for _, id := range *l.add {
			if !slices.Contains(*l.was, id) {
				*l.was, more = append(*l.was, id), true
			}
		}
		slices.Sort(*l.was)
	}
	fresh := i.LastSeenAt.Sub(was.LastSeenAt) >= incidentEvery || i.Count > was.Count
	count := max(was.Count+1, i.Count)
	if i.Summary != "" && i.Summary != was.Summary {
		was.Summary, more = i.Summary, true
	}
	summary, key := was.Summary, was.Key
	if more || fresh {
		was.LastSeenAt, was.Count, was.Version = i.LastSeenAt, count, was.Version+1
		_, err := j.tx.Exec(ctx, `UPDATE recovery.incident SET summary = $2, tenant_ids = $3, workspace_ids = $4, node_ids = $5, last_seen_at = $6, count = $7,
			version = $8 WHERE incident_id = $1`, was.ID, summary, texts(was.Tenants), texts(was.Workspaces), texts(was.Nodes), was.LastSeenAt, was.Count, was.Version)
		if err != nil {
			return fmt.Errorf("go on with incident %s: %w", key, err)
		}
		if err := was.report(ctx, j.tx); err != nil {
			return err
		}
	}
	*i = *was
	return nil
}

// closeOthers closes the open incidents of a kind that go on no longer.
func (j *judging) closeOthers(ctx context.Context, kind commonv1.IncidentKind, goesOn func(*incident) bool) error {
	rows, err := j.tx.Query(ctx, `SELECT `+incidentColumns+` FROM recovery.incident WHERE kind = $1 AND closed_at IS NULL ORDER BY incident_id FOR UPDATE`, names.Of(kind))
	if err != nil {
		return fmt.Errorf("read incidents: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*incident, error) { return scanIncident(row) })
	if err != nil {
		return fmt.Errorf("read incidents: %w", err)
	}
	for _, i := range list {
		if goesOn(i) {
			continue
		}
		if err := closeIncident(ctx, j.tx, kind, i.Key, requesterName, j.now); err != nil {
			return err
		}
	}
	return nil
}

func closeIncident(ctx context.Context, tx pgx.Tx, kind commonv1.IncidentKind, key, by string, now time.Time) error {
	i, err := scanIncident(tx.QueryRow(ctx, `UPDATE recovery.incident SET closed_at = $3, closed_by = $4, version = version + 1
		WHERE kind = $1 AND key = $2 AND closed_at IS NULL RETURNING `+incidentColumns, names.Of(kind), key, now, by))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("close incident: %w", err)
	}
	return i.report(ctx, tx)
}

// texts is a list as a column that is never null.
func texts(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
