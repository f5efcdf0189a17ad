package view

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

// RecoveryFilter narrows a list of recoveries. Zero fields do not.
type RecoveryFilter struct {
	WorkspaceID string
	Workspaces  []string // of these alone, if it is not nil
	From, To    time.Time
}

// Recoveries returns one page of recovery records, newest first.
func (s *Snapshot) Recoveries(ctx context.Context, f RecoveryFilter, page list.Page) ([]*recoveryv1.RecoveryRecord,
	string,
	error,
) {
	l := s.perWorkspace(&recoveryLayout, listRecoveries, PerWorkspaceFilter{WorkspaceID: f.WorkspaceID})
	l.When(f.Workspaces != nil, ofWorkspaces, f.Workspaces)
	l.When(!f.From.IsZero(), detectedFrom, f.From)
	l.When(!f.To.IsZero(), detectedUntil, f.To)
	items, next, err := run(ctx, s, l, page, fromBody[recoveryv1.RecoveryRecord])
	return list.ShownAll(s.scope, items), next, err
}

var incidentLayout = list.Layout{
	Name: "incidents", Columns: "x.body", From: "readmodel.incident x", ID: "x.incident_id",
	Conditions: []list.Condition{isOpen},
}

var listIncidents = pg.DefineDynamic(pg.RoleReadmodel, "view.list_incidents", incidentLayout.Compose,
	incidentLayout.Samples()...)

// Incidents returns one page, newest first: the open ones, or all. It refuses a scope that is bound to a tenant,
// because an incident lists the objects of all tenants that it affects.
func (s *Snapshot) Incidents(ctx context.Context, closed bool, page list.Page) ([]*recoveryv1.Incident, string, error) {
	if !s.scope.Everything() {
		return nil, "", list.OperatorsOnly()
	}
	l := list.Request{Layout: &incidentLayout, Statement: listIncidents}
	l.When(!closed, isOpen)
	items, next, err := run(ctx, s, l, page, fromBody[recoveryv1.Incident])
	if err != nil {
		return nil, "", err
	}
	return items, next, s.nameIncidents(ctx, items...)
}

// nameIncidents fills in the names of the workspaces and nodes that incidents affect; a name that is not known stays
// empty.
func (s *Snapshot) nameIncidents(ctx context.Context, items ...*recoveryv1.Incident) error {
	var objects []lookup.Nameless
	for _, i := range items {
		i.Workspaces, i.NodeNames = make([]string, len(i.GetWorkspaceIds())), make([]string, len(i.GetNodeIds()))
		for n, id := range i.GetWorkspaceIds() {
			objects = append(objects, lookup.Nameless{WorkspaceID: id, Workspace: &i.Workspaces[n]})
		}
		for n, id := range i.GetNodeIds() {
			objects = append(objects, lookup.Nameless{NodeID: id, Node: &i.NodeNames[n]})
		}
	}
	return s.find().Name(ctx, objects)
}

// incidentLead is how long before an incident was opened a recovery that it refers to may have begun.
const incidentLead = time.Hour

var (
	incidentByID = pg.Define(pg.RoleReadmodel, "view.incident_by_id",
		`SELECT x.body FROM readmodel.incident x WHERE x.incident_id = $1::uuid`)
	fleetBrake = pg.Define(pg.RoleReadmodel, "view.fleet_brake",
		`SELECT x.body FROM readmodel.brake x WHERE x.name = 'fleet'`)
)

// body runs a statement that returns one body, and decodes it; the error is pgx.ErrNoRows if there is none.
func body[T any, M message[T]](ctx context.Context, s *Snapshot, statement *pg.Statement, args ...any) (M, error) {
	raw, err := pg.Value[[]byte](ctx, s.tx, statement, args...)
	if err != nil {
		return nil, err
	}
	return decode[T, M](raw)
}

// Incident returns one incident by id, with the recoveries that it refers to.
func (s *Snapshot) Incident(ctx context.Context, id string) (*recoveryv1.Incident, []*recoveryv1.RecoveryRecord,
	error,
) {
	if !s.scope.Everything() || !list.IsID(id) {
		return nil, nil, list.NotFound("incident", id)
	}
	i, err := body[recoveryv1.Incident](ctx, s, incidentByID, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil, list.NotFound("incident", id)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read incident: %w", err)
	}
	if err := s.nameIncidents(ctx, i); err != nil {
		return nil, nil, err
	}
	workspaces := i.GetWorkspaceIds()
	if len(workspaces) == 0 {
		return i, nil, nil
	}
	f := RecoveryFilter{Workspaces: workspaces, From: i.GetOpenedAt().AsTime().Add(-incidentLead)}
	if i.GetClosedAt() != nil {
		f.To = i.GetClosedAt().AsTime()
	}
	records, _, err := s.Recoveries(ctx, f, list.Page{Size: list.MaxSize})
	return i, records, err
}

// Brake returns the fleet brake. Before its first event it is not engaged.
func (s *Snapshot) Brake(ctx context.Context) (*recoveryv1.Brake, error) {
	if !s.scope.Everything() {
		return nil, list.NotFound("brake", "")
	}
	b, err := body[recoveryv1.Brake](ctx, s, fleetBrake)
	if errors.Is(err, pgx.ErrNoRows) {
		return &recoveryv1.Brake{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read brake: %w", err)
	}
	return b, nil
}

var cordonsWaiting = pg.Define(pg.RoleReadmodel, "view.cordons_waiting", `
	SELECT count(*)::integer FROM readmodel.gate g WHERE g.body ? 'waiting_cordon'`)

// CordonsWaiting returns how many nodes are to be cordoned for the reason of an open incident while the cordon waits,
// because that were too many of the fleet at once, and adds them to the incident's summary.
func (s *Snapshot) CordonsWaiting(ctx context.Context, i *recoveryv1.Incident) (int32, error) {
	// It is the only reason for which a verdict cordons.
	cordons := i.GetErrorCode() == names.Of(commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT)
	if i.GetKind() != commonv1.IncidentKind_INCIDENT_KIND_FLEET_DRIFT || !cordons || i.GetClosedAt() != nil {
		return 0, nil
	}
	n, err := pg.Value[int32](ctx, s.tx, cordonsWaiting)
	if err != nil {
		return 0, fmt.Errorf("count cordons that wait: %w", err)
	}
	if n > 0 {
		i.Summary += fmt.Sprintf("; the cordons of %d of them wait, since a cordon of so many would leave no place for "+
			"workspaces (%s)", n, policy.BrakeFleetFraction)
	}
	return n, nil
}
