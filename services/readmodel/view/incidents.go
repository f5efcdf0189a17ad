package view

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// RecoveryFilter narrows a list of recoveries. Zero fields do not.
type RecoveryFilter struct {
	WorkspaceID string
	Workspaces  []string // of these alone, if it is not nil
	From, To    time.Time
}

// Recoveries returns one page of recovery records, newest first.
func (s *Snapshot) Recoveries(ctx context.Context, f RecoveryFilter, page Page) ([]*recoveryv1.RecoveryRecord, string,
	error,
) {
	l := s.perWorkspace(&recoveryLayout, listRecoveries, PerWorkspaceFilter{WorkspaceID: f.WorkspaceID})
	if f.Workspaces != nil {
		l.and(ofWorkspaces, f.Workspaces)
	}
	if !f.From.IsZero() {
		l.and(detectedFrom, f.From)
	}
	if !f.To.IsZero() {
		l.and(detectedUntil, f.To)
	}
	return run(ctx, s, l, page, fromBody[recoveryv1.RecoveryRecord])
}

var incidentLayout = layout{
	name: "incidents", columns: "x.body", from: "readmodel.incident x", id: "x.incident_id",
	conditions: []condition{isOpen},
}

var listIncidents = pg.DefineDynamic(pg.RoleReadmodel, "view.list_incidents", incidentLayout.compose,
	incidentLayout.samples()...)

// Incidents returns one page, newest first: the open ones, or all. It refuses a scope that is bound to a tenant,
// because an incident lists the objects of all tenants that it affects.
func (s *Snapshot) Incidents(ctx context.Context, closed bool, page Page) ([]*recoveryv1.Incident, string, error) {
	if !s.scope.Everything() {
		return nil, "", operatorsOnly()
	}
	l := listing{layout: &incidentLayout, statement: listIncidents}
	if !closed {
		l.and(isOpen)
	}
	items, next, err := run(ctx, s, l, page, fromBody[recoveryv1.Incident])
	if err != nil {
		return nil, "", err
	}
	return items, next, s.nameIncidents(ctx, items...)
}

// nameIncidents fills in the names of the workspaces and nodes that incidents affect; a name that is not known stays
// empty.
func (s *Snapshot) nameIncidents(ctx context.Context, items ...*recoveryv1.Incident) error {
	var objects []nameless
	for _, i := range items {
		i.Workspaces, i.NodeNames = make([]string, len(i.GetWorkspaceIds())), make([]string, len(i.GetNodeIds()))
		for n, id := range i.GetWorkspaceIds() {
			objects = append(objects, nameless{workspaceID: id, workspace: &i.Workspaces[n]})
		}
		for n, id := range i.GetNodeIds() {
			objects = append(objects, nameless{nodeID: id, node: &i.NodeNames[n]})
		}
	}
	return s.find().withNames(ctx, objects)
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
	if !s.scope.Everything() || !isUUID(id) {
		return nil, nil, notFound("incident")
	}
	i, err := body[recoveryv1.Incident](ctx, s, incidentByID, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil, notFound("incident")
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
	records, _, err := s.Recoveries(ctx, f, Page{Size: maxPage})
	return i, records, err
}

// Brake returns the fleet brake. Before its first event it is not engaged.
func (s *Snapshot) Brake(ctx context.Context) (*recoveryv1.Brake, error) {
	if !s.scope.Everything() {
		return nil, notFound("brake")
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
