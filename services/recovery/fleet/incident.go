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
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
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
	Count      int64                 `db:"count"`
	Version    int64                 `db:"version"`
}

// incidentRow is an incident as it is stored.
type incidentRow struct {
	Incident
	KindText     string `db:"kind"`
	SeverityText string `db:"severity"`
	LayerText    string `db:"owner_layer"`
}

var (
	lockIncident = pg.Define(pg.RoleRecovery, "fleet.lock_incident", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i
			WHERE i.kind = $1 AND i.key = $2 AND i.closed_at IS NULL FOR UPDATE`)

	lockIncidents = pg.Define(pg.RoleRecovery, "fleet.lock_incidents", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i WHERE i.kind = $1 AND i.closed_at IS NULL
			ORDER BY i.incident_id FOR UPDATE`)

	insertIncident = pg.Define(pg.RoleRecovery, "fleet.insert_incident", `
		INSERT INTO recovery.incident (incident_id, kind, key, severity, summary, step, error_code, tenant_ids, workspace_ids,
			node_ids,
			owner_layer, next_action, opened_at, last_seen_at, count)
				VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)`)

	updateIncident = pg.Define(pg.RoleRecovery, "fleet.update_incident", `
		UPDATE recovery.incident
			SET summary = $2, tenant_ids = $3, workspace_ids = $4, node_ids = $5, last_seen_at = $6, count = $7,
			version = $8 WHERE incident_id = $1`)

	endIncident = pg.Define(pg.RoleRecovery, "fleet.close_incident", `
		UPDATE recovery.incident i SET closed_at = $3, closed_by = $4, version = version + 1
		WHERE i.kind = $1 AND i.key = $2 AND i.closed_at IS NULL RETURNING `+pg.Columns[incidentRow]("i"))
)

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

// About adds the tenant, workspace and node that the incident concerns. Empty ids are ignored.
func (i *Incident) About(tenant, workspace, node string) {
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

// Proto returns the incident as its event and the API show it.
func (i *Incident) Proto() *recoveryv1.Incident {
	return &recoveryv1.Incident{
		IncidentId: i.ID, Kind: i.Kind, Severity: i.Severity, Summary: i.Summary, Step: i.Step, ErrorCode: i.ErrorCode,
		TenantIds: i.Tenants, WorkspaceIds: i.Workspaces, NodeIds: i.Nodes, OwnerLayer: i.OwnerLayer,
		NextAction: i.NextAction, OpenedAt: timestamppb.New(i.OpenedAt), LastSeenAt: timestamppb.New(i.LastSeenAt),
		ClosedAt: incident.Stamp(i.ClosedAt), ClosedBy: i.ClosedBy, Count: i.Count,
		Version: i.Version,
	}
}

func (i *Incident) report(ctx context.Context, tx pgx.Tx) error {
	action, by := "", ""
	switch {
	case i.ClosedAt != nil:
		action = "incident.close"
		if i.ClosedBy != byWatchdog {
			by = i.ClosedBy
		}
	case i.Version <= 1:
		action = "incident.open"
	}
	return incident.Report(ctx, tx, i.Proto(), action, by)
}

// openIncident locks and returns the open incident of a kind and key; nil if there is none.
func openIncident(ctx context.Context, tx pgx.Tx, kind commonv1.IncidentKind, key string) (*Incident, error) {
	i, err := readIncident(ctx, tx, lockIncident, names.Of(kind), key)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read incident: %w", err)
	}
	return i, nil
}

// Raise opens an incident, with the severity of its kind unless it has one, or updates the open one of the same kind
// and key: it adds the ids that the incident concerns, and counts it again at most once each incidentEvery. i is set to
// the stored incident.
func (r *Round) Raise(ctx context.Context, i *Incident) error {
	if i.LastSeenAt.IsZero() {
		i.LastSeenAt = r.now
	}
	was, err := openIncident(ctx, r.tx, i.Kind, i.Key)
	if err != nil {
		return err
	}
	if was == nil {
		if err := r.Writes(); err != nil {
			return err
		}
		i.ID, i.OpenedAt, i.Count, i.Version = ids.New(), r.now, max(i.Count, 1), 1
		if i.Severity == 0 {
			i.Severity = fault.AlertOf(i.Kind).Severity
		}
		_, err := pg.Exec(ctx, r.tx, insertIncident,
			i.ID, names.Of(i.Kind), i.Key, names.Of(i.Severity), i.Summary, i.Step, i.ErrorCode, texts(i.Tenants),
			texts(i.Workspaces), texts(i.Nodes), names.OfSet(i.OwnerLayer), i.NextAction, i.OpenedAt, i.LastSeenAt, i.Count)
		if err != nil {
			return fmt.Errorf("open incident: %w", err)
		}
		return i.report(ctx, r.tx)
	}
	return r.goOn(ctx, was, i)
}

// touch updates the open incident of a kind and key; without one it does nothing.
func (r *Round) touch(ctx context.Context, i *Incident) error {
	was, err := openIncident(ctx, r.tx, i.Kind, i.Key)
	if err != nil || was == nil {
		return err
	}
	i.LastSeenAt, i.Summary = r.now, was.Summary
	return r.goOn(ctx, was, i)
}

func (r *Round) goOn(ctx context.Context, was, i *Incident) error {
	more := false
	for _, l := range []struct{ was, add *[]string }{
		{&was.Tenants, &i.Tenants}, {&was.Workspaces, &i.Workspaces}, {&was.Nodes, &i.Nodes},
	} {
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
	if more || fresh {
		if err := r.Writes(); err != nil {
			return err
		}
		was.LastSeenAt, was.Count = i.LastSeenAt, count
		if err := was.update(ctx, r.tx); err != nil {
			return err
		}
	}
	*i = *was
	return nil
}

// update writes what may change of an open incident as its next version, and reports it.
func (i *Incident) update(ctx context.Context, tx pgx.Tx) error {
	i.Version++
	_, err := pg.Exec(ctx, tx, updateIncident, i.ID, i.Summary, texts(i.Tenants), texts(i.Workspaces), texts(i.Nodes),
		i.LastSeenAt, i.Count, i.Version)
	if err != nil {
		return fmt.Errorf("go on with incident of %s: %w", i.Key, err)
	}
	return i.report(ctx, tx)
}

// CloseOthers closes the open incidents of a kind for which goesOn returns false.
func (r *Round) CloseOthers(ctx context.Context, kind commonv1.IncidentKind, goesOn func(*Incident) bool) error {
	rows, err := pg.All[incidentRow](ctx, r.tx, lockIncidents, names.Of(kind))
	if err != nil {
		return fmt.Errorf("read incidents: %w", err)
	}
	for _, row := range rows {
		i := row.read(ctx)
		if goesOn(i) {
			continue
		}
		if err := r.Writes(); err != nil {
			return err
		}
		if err := closeIncident(ctx, r.tx, kind, i.Key, byWatchdog, r.now); err != nil {
			return err
		}
	}
	return nil
}

func closeIncident(ctx context.Context, tx pgx.Tx, kind commonv1.IncidentKind, key, by string, now time.Time) error {
	i, err := readIncident(ctx, tx, endIncident, names.Of(kind), key, now, by)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("close incident: %w", err)
	}
	return i.report(ctx, tx)
}

// texts returns a list for a column that is never null.
func texts(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
