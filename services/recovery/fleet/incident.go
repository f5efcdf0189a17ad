package fleet

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
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// Short names.
const (
	kindClass = commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS
	kindBrake = commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE
)

// incidentEvery is how often an incident that goes on unchanged is counted and reported again.
const incidentEvery = time.Minute

// Incident is a row of incident.
type Incident struct {
	ID         string                `db:"incident_id" expr:"@.incident_id::text"`
	Key        string                `db:"key"`
	Kind       commonv1.IncidentKind `db:"-"`
	Severity   commonv1.Severity     `db:"-"`
	Summary    string                `db:"summary"`
	Step       string                `db:"step"`
	ErrorCode  string                `db:"error_code"`
	Tenants    []string              `db:"tenant_ids"`
	Workspaces []string              `db:"workspace_ids"`
	Nodes      []string              `db:"node_ids"`
	OwnerLayer commonv1.OwnerLayer   `db:"-"`
	NextAction string                `db:"next_action"`
	OpenedAt   time.Time             `db:"opened_at"`
	LastSeenAt time.Time             `db:"last_seen_at"`
	ClosedAt   *time.Time            `db:"closed_at"`
	ClosedBy   string                `db:"closed_by"`
	// CloseReason is that of the person who closed it; empty for an incident that ended by itself.
	CloseReason string `db:"close_reason"`
	Count       int64  `db:"count"`
	Version     int64  `db:"version"`
}

// incidentRow is an incident as it is stored.
type incidentRow struct {
	Incident
	KindText     string `db:"kind"`
	SeverityText string `db:"severity"`
	LayerText    string `db:"owner_layer"`
}

// read returns the incident of a row. A value that this build does not know is reported by package aside, shown as
// unspecified, and left unchanged in the row.
func (r *incidentRow) read(ctx context.Context) *Incident {
	i := &r.Incident
	var errs [3]error
	i.Kind, errs[0] = names.Parse[commonv1.IncidentKind](r.KindText)
	i.Severity, errs[1] = names.Parse[commonv1.Severity](r.SeverityText)
	if r.LayerText != "" {
		i.OwnerLayer, errs[2] = names.Parse[commonv1.OwnerLayer](r.LayerText)
	}
	for _, err := range errs {
		if err != nil {
			aside.Note(ctx, "watchdog.incident", i.ID, err)
		}
	}
	return i
}

// unread returns an error if read leaves out a value that this build does not know.
func (r *incidentRow) unread() error {
	_, kind := names.Parse[commonv1.IncidentKind](r.KindText)
	_, severity := names.Parse[commonv1.Severity](r.SeverityText)
	var layer error
	if r.LayerText != "" {
		_, layer = names.Parse[commonv1.OwnerLayer](r.LayerText)
	}
	if err := errors.Join(kind, severity, layer); err != nil {
		return fmt.Errorf("incident %s has what this build does not know: %w", r.ID, err)
	}
	return nil
}

// readIncident runs a statement that returns one incident.
func readIncident(ctx context.Context, tx pgx.Tx, s *pg.Statement, args ...any) (*Incident, error) {
	r, err := pg.One[incidentRow](ctx, tx, s, args...)
	if err != nil {
		return nil, err
	}
	return r.read(ctx), nil
}

// names reports whether the incident is of these nodes, and of as many as there are.
func (i *Incident) names(nodes []string, count int64) bool {
	return count == i.Count && slices.Equal(nodes, i.Nodes)
}

// About adds the tenant, workspace and node that the incident concerns. Empty ids are ignored. An id that is added
// again is stored once.
func (i *Incident) About(tenant, workspace, node string) {
	add := func(list *[]string, id string) {
		if id != "" {
			*list = append(*list, id)
		}
	}
	add(&i.Tenants, tenant)
	add(&i.Workspaces, workspace)
	add(&i.Nodes, node)
}

// sorted returns the distinct ids of a list in order, in the memory of the list.
func sorted(list []string) []string {
	slices.Sort(list)
	return slices.Compact(list)
}

// Proto returns the incident as its event and the API show it.
func (i *Incident) Proto() *recoveryv1.Incident {
	return &recoveryv1.Incident{
		IncidentId: i.ID, Kind: i.Kind, Severity: i.Severity, Summary: i.Summary, Step: i.Step, ErrorCode: i.ErrorCode,
		TenantIds: i.Tenants, WorkspaceIds: i.Workspaces, NodeIds: i.Nodes, OwnerLayer: i.OwnerLayer,
		NextAction: i.NextAction, OpenedAt: timestamppb.New(i.OpenedAt), LastSeenAt: timestamppb.New(i.LastSeenAt),
		ClosedAt: incident.Stamp(i.ClosedAt), ClosedBy: i.ClosedBy,
		CloseReason: i.CloseReason, Count: i.Count, Version: i.Version,
	}
}

// report appends the events of incidents and the audit entries of those that were opened or closed.
func report(ctx context.Context, tx pgx.Tx, list ...*Incident) error {
	if len(list) == 0 {
		return nil
	}
	var evs []events.Event
	for _, i := range list {
		shown, action, by := i.Proto(), "", ""
		switch {
		case i.ClosedAt != nil:
			action = "incident.close"
			if i.ClosedBy != byWatchdog {
				by = i.ClosedBy
			}
		case i.Version <= 1:
			action = "incident.open"
		}
		evs = append(evs, incident.Event(shown))
		if action != "" {
			evs = append(evs, audit.Event(ctx, incident.Entry(shown, action, by)))
		}
	}
	if _, err := events.Append(ctx, tx, evs...); err != nil {
		return fmt.Errorf("report incidents: %w", err)
	}
	return nil
}
