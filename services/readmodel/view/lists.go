package view

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// message is a pointer to a generated message.
type message[T any] interface {
	*T
	proto.Message
}

// bodyRow is a row of a list whose only column is its body.
type bodyRow struct {
	place
	Body []byte `db:"body"`
}

// decode decodes a body into a new message.
func decode[T any, M message[T]](body []byte) (M, error) {
	m := M(new(T))
	return m, project.Decode(body, m)
}

// fromBody reads the row of a list.
func fromBody[T any, M message[T]](row bodyRow) (M, error) { return decode[T, M](row.Body) }

// fromBodies reads the bodies of other rows.
func fromBodies[T any, M message[T]](bodies [][]byte) ([]M, error) {
	out := make([]M, 0, len(bodies))
	for _, body := range bodies {
		m, err := decode[T, M](body)
		if err != nil {
			return nil, err
		}
		out = append(out, m)
	}
	return out, nil
}

// PerWorkspaceFilter narrows lists of instances, claims and allocations. Zero fields do not.
type PerWorkspaceFilter struct {
	WorkspaceID string
	NodeID      string // instances
	LiveOnly    bool   // instances
	Orphaned    bool   // claims
	Released    bool   // claims: include released ones
	IDs         []string
}

const (
	ofWorkspace   condition = "x.workspace_id = ?::uuid"
	onNode        condition = "x.node_id = ?::uuid"
	live          condition = "x.live"
	orphaned      condition = "x.orphaned"
	unreleased    condition = "NOT x.released"
	ofWorkspaces  condition = "x.workspace_id::text = ANY(?)"
	detectedFrom  condition = "x.detected_at >= ?"
	detectedUntil condition = "x.detected_at <= ?"
	isOpen        condition = "x.open"
	theFinding    condition = "x.finding_id = ?::uuid"
)

// perWorkspaceLayout returns the layout of a list of objects that belong to workspaces.
func perWorkspaceLayout(name, table, id string, more ...condition) layout {
	return layout{
		name: name, columns: "x.body", from: "readmodel." + table + " x", id: "x." + id, lead: 1, tenant: "x.tenant_id",
		conditions: append([]condition{ofWorkspace, byIDs(id)}, more...),
	}
}

func byIDs(id string) condition { return condition("x." + id + " = ANY(?::uuid[])") }

var (
	instanceLayout   = perWorkspaceLayout("instances", "instance", "instance_id", live, onNode)
	claimLayout      = perWorkspaceLayout("claims", "claim", "claim_id", orphaned, unreleased)
	allocationLayout = perWorkspaceLayout("allocations", "allocation", "allocation_id")
	runLayout        = perWorkspaceLayout("runs", "run", "run_id", live)
	recoveryLayout   = perWorkspaceLayout("recoveries", "recovery_record", "record_id", ofWorkspaces, detectedFrom,
		detectedUntil)

	listInstances = pg.DefineDynamic(pg.RoleReadmodel, "view.list_instances", instanceLayout.compose,
		instanceLayout.samples()...)
	listClaims      = pg.DefineDynamic(pg.RoleReadmodel, "view.list_claims", claimLayout.compose, claimLayout.samples()...)
	listAllocations = pg.DefineDynamic(pg.RoleReadmodel, "view.list_allocations", allocationLayout.compose,
		allocationLayout.samples()...)
	listRuns       = pg.DefineDynamic(pg.RoleReadmodel, "view.list_runs", runLayout.compose, runLayout.samples()...)
	listRecoveries = pg.DefineDynamic(pg.RoleReadmodel, "view.list_recoveries", recoveryLayout.compose,
		recoveryLayout.samples()...)
)

func (s *Snapshot) perWorkspace(of *layout, statement *pg.Dynamic[parts], f PerWorkspaceFilter) listing {
	l := listing{layout: of, statement: statement, args: []any{s.scope.arg()}}
	if f.WorkspaceID != "" {
		l.and(ofWorkspace, optional(f.WorkspaceID))
	}
	if f.IDs != nil {
		l.and(of.conditions[1], f.IDs)
	}
	return l
}

// Instances returns one page, newest first.
func (s *Snapshot) Instances(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Instance, string,
	error,
) {
	l := s.perWorkspace(&instanceLayout, listInstances, f)
	if f.NodeID != "" {
		l.and(onNode, f.NodeID)
	}
	if f.LiveOnly {
		l.and(live)
	}
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Instance])
	return namedPage(ctx, s.find(), func(i *lifecyclev1.Instance) nameless {
		return nameless{workspaceID: i.GetWorkspaceId(), nodeID: i.GetNodeId(), workspace: &i.Workspace, node: &i.NodeName}
	}, items, next, err)
}

// Claims returns one page, newest first.
func (s *Snapshot) Claims(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Claim, string, error) {
	l := s.perWorkspace(&claimLayout, listClaims, f)
	if f.Orphaned {
		l.and(orphaned)
	}
	if !f.Released {
		l.and(unreleased)
	}
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Claim])
	return namedPage(ctx, s.find(), func(c *lifecyclev1.Claim) nameless {
		return nameless{workspaceID: c.GetWorkspaceId(), nodeID: c.GetNodeId(), workspace: &c.Workspace, node: &c.NodeName}
	}, items, next, err)
}

// Allocations returns one page, newest first.
func (s *Snapshot) Allocations(ctx context.Context, f PerWorkspaceFilter, page Page) ([]*lifecyclev1.Allocation, string,
	error,
) {
	items, next, err := run(ctx, s, s.perWorkspace(&allocationLayout, listAllocations, f), page,
		fromBody[lifecyclev1.Allocation])
	return namedPage(ctx, s.find(), func(a *lifecyclev1.Allocation) nameless {
		return nameless{workspaceID: a.GetWorkspaceId(), nodeID: a.GetNodeId(), workspace: &a.Workspace, node: &a.NodeName}
	}, items, next, err)
}

// Allocation returns one allocation by id.
func (s *Snapshot) Allocation(ctx context.Context, id string) (*lifecyclev1.Allocation, error) {
	found, _, err := s.Allocations(ctx, PerWorkspaceFilter{IDs: idList(id)}, Page{Size: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("allocation")
	}
	return found[0], nil
}

// run returns one page of a list and the token of the next page.
func run[R placed, T any](ctx context.Context, s *Snapshot, l listing, page Page,
	read func(R) (T, error),
) ([]T, string, error) {
	rows, next, err := pageOf(l, s.scope, page, func(statement *pg.Statement, args ...any) ([]R, error) {
		return rowsOf[R](ctx, s, statement, args...)
	})
	if err != nil {
		return nil, "", err
	}
	var items []T
	for _, row := range rows {
		item, err := read(row)
		if err != nil {
			return nil, "", fmt.Errorf("list %s: %w", l.layout.name, err)
		}
		items = append(items, item)
	}
	return items, next, nil
}

func first[T any](found []*T) *T {
	if len(found) == 0 {
		return nil
	}
	return found[0]
}
