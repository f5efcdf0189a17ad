package view

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/proto"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
	"github.com/gpuaas/mesh/services/readmodel/project/rowbody"
)

// message is a pointer to a generated message.
type message[T any] interface {
	*T
	proto.Message
}

// bodyRow is a row of a list whose only column is its body.
type bodyRow struct {
	list.Place
	Body []byte `db:"body"`
}

// decode decodes a body into a new message.
func decode[T any, M message[T]](body []byte) (M, error) {
	m := M(new(T))
	return m, rowbody.Decode(body, m)
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
	ofWorkspace   list.Condition = "x.workspace_id = ?::uuid"
	onNode        list.Condition = "x.node_id = ?::uuid"
	live          list.Condition = "x.live"
	orphaned      list.Condition = "x.orphaned"
	unreleased    list.Condition = "NOT x.released"
	ofWorkspaces  list.Condition = "x.workspace_id::text = ANY(?)"
	detectedFrom  list.Condition = "x.detected_at >= ?"
	detectedUntil list.Condition = "x.detected_at <= ?"
	isOpen        list.Condition = "x.open"
	theFinding    list.Condition = "x.finding_id = ?::uuid"
)

// perWorkspaceLayout returns the layout of a list of objects that belong to workspaces.
func perWorkspaceLayout(name, table, id string, more ...list.Condition) list.Layout {
	return list.Layout{
		Name: name, Columns: "x.body", From: "readmodel." + table + " x", ID: "x." + id, Lead: 1, Tenant: "x.tenant_id",
		Conditions: append([]list.Condition{ofWorkspace, byIDs(id)}, more...),
	}
}

func byIDs(id string) list.Condition { return list.Condition("x." + id + " = ANY(?::uuid[])") }

var (
	instanceLayout   = perWorkspaceLayout("instances", "instance", "instance_id", live, onNode)
	claimLayout      = perWorkspaceLayout("claims", "claim", "claim_id", orphaned, unreleased)
	allocationLayout = perWorkspaceLayout("allocations", "allocation", "allocation_id")
	runLayout        = perWorkspaceLayout("runs", "run", "run_id", live)
	recoveryLayout   = perWorkspaceLayout("recoveries", "recovery_record", "record_id", ofWorkspaces, detectedFrom,
		detectedUntil)

	listInstances = pg.DefineDynamic(pg.RoleReadmodel, "view.list_instances", instanceLayout.Compose,
		instanceLayout.Samples()...)
	listClaims      = pg.DefineDynamic(pg.RoleReadmodel, "view.list_claims", claimLayout.Compose, claimLayout.Samples()...)
	listAllocations = pg.DefineDynamic(pg.RoleReadmodel, "view.list_allocations", allocationLayout.Compose,
		allocationLayout.Samples()...)
	listRuns       = pg.DefineDynamic(pg.RoleReadmodel, "view.list_runs", runLayout.Compose, runLayout.Samples()...)
	listRecoveries = pg.DefineDynamic(pg.RoleReadmodel, "view.list_recoveries", recoveryLayout.Compose,
		recoveryLayout.Samples()...)
)

func (s *Snapshot) perWorkspace(of *list.Layout, statement *pg.Dynamic[list.Parts], f PerWorkspaceFilter) list.Request {
	l := list.Request{Layout: of, Statement: statement, Args: []any{s.scope.Arg()}}
	l.When(f.WorkspaceID != "", ofWorkspace, list.OptionalID(f.WorkspaceID))
	l.When(f.IDs != nil, of.Conditions[1], f.IDs)
	return l
}

// Instances returns one page, newest first.
func (s *Snapshot) Instances(ctx context.Context, f PerWorkspaceFilter, page list.Page) ([]*lifecyclev1.Instance,
	string,
	error,
) {
	l := s.perWorkspace(&instanceLayout, listInstances, f)
	l.When(f.NodeID != "", onNode, list.OptionalID(f.NodeID))
	l.When(f.LiveOnly, live)
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Instance])
	return namePage(ctx, s, func(i *lifecyclev1.Instance) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: i.GetWorkspaceId(), NodeID: i.GetNodeId(), Workspace: &i.Workspace,
			Node: &i.NodeName,
		}
	}, items, next, err)
}

// Claims returns one page, newest first.
func (s *Snapshot) Claims(ctx context.Context, f PerWorkspaceFilter, page list.Page) ([]*lifecyclev1.Claim, string,
	error,
) {
	l := s.perWorkspace(&claimLayout, listClaims, f)
	l.When(f.Orphaned, orphaned)
	l.When(!f.Released, unreleased)
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Claim])
	return namePage(ctx, s, func(c *lifecyclev1.Claim) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: c.GetWorkspaceId(), NodeID: c.GetNodeId(), Workspace: &c.Workspace,
			Node: &c.NodeName,
		}
	}, items, next, err)
}

// Allocations returns one page, newest first.
func (s *Snapshot) Allocations(ctx context.Context, f PerWorkspaceFilter, page list.Page) ([]*lifecyclev1.Allocation,
	string,
	error,
) {
	items, next, err := run(ctx, s, s.perWorkspace(&allocationLayout, listAllocations, f), page,
		fromBody[lifecyclev1.Allocation])
	return namePage(ctx, s, func(a *lifecyclev1.Allocation) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: a.GetWorkspaceId(), NodeID: a.GetNodeId(), Workspace: &a.Workspace,
			Node: &a.NodeName,
		}
	}, items, next, err)
}

// Allocation returns one allocation by id.
func (s *Snapshot) Allocation(ctx context.Context, id string) (*lifecyclev1.Allocation, error) {
	found, _, err := s.Allocations(ctx, PerWorkspaceFilter{IDs: list.OneID(id)}, list.Page{Size: 1})
	return only(found, err, "allocation", id)
}

// run returns one page of a list and the token of the next page.
func run[R list.Placed, T any](ctx context.Context, s *Snapshot, l list.Request, page list.Page,
	read func(R) (T, error),
) ([]T, string, error) {
	rows, next, err := list.Read(l, s.scope, page, func(statement *pg.Statement, args ...any) ([]R, error) {
		return rowsOf[R](ctx, s, statement, args...)
	})
	if err != nil {
		return nil, "", err
	}
	var items []T
	for _, row := range rows {
		item, err := read(row)
		if err != nil {
			return nil, "", fmt.Errorf("list %s: %w", l.Layout.Name, err)
		}
		items = append(items, item)
	}
	return items, next, nil
}

// namePage fills in the names of one page of a list, and returns its items as the scope may see them.
func namePage[M proto.Message](
	ctx context.Context, s *Snapshot, of func(M) lookup.Nameless, items []M, next string, err error,
) ([]M, string, error) {
	items, next, err = lookup.NamePage(ctx, s.find(), of, items, next, err)
	return list.ShownAll(s.scope, items), next, err
}

// only returns the object of a list that was asked for one as ref, or that there is none such.
func only[T any](found []*T, err error, what, ref string) (*T, error) {
	if err == nil && len(found) == 0 {
		err = list.NotFound(what, ref)
	}
	return first(found), err
}

func first[T any](found []*T) *T {
	if len(found) == 0 {
		return nil
	}
	return found[0]
}
