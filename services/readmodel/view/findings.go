package view

import (
	"context"
	"fmt"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

// FindingFilter narrows a list of findings. Zero fields do not.
type FindingFilter struct {
	WorkspaceID string
	Resolved    bool // include resolved ones
	ID          string
}

var findingLayout = list.Layout{
	Name: "findings", Columns: "x.body", From: "readmodel.finding x", ID: "x.finding_id",
	Conditions: []list.Condition{ofWorkspace, theFinding, isOpen},
}

var listFindings = pg.DefineDynamic(pg.RoleReadmodel, "view.list_findings", findingLayout.Compose,
	findingLayout.Samples()...)

// Findings returns one page, newest first. It refuses a scope that is bound to a tenant, because findings concern
// machines and other tenants' workspaces on them.
func (s *Snapshot) Findings(ctx context.Context, f FindingFilter, page list.Page) ([]*lifecyclev1.Finding, string,
	error,
) {
	if !s.scope.Everything() {
		return nil, "", list.OperatorsOnly()
	}
	l := list.Request{Layout: &findingLayout, Statement: listFindings}
	l.When(f.WorkspaceID != "", ofWorkspace, list.OptionalID(f.WorkspaceID))
	l.When(f.ID != "", theFinding, f.ID)
	l.When(!f.Resolved, isOpen)
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Finding])
	return lookup.NamePage(ctx, s.find(), func(f *lifecyclev1.Finding) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: f.GetWorkspaceId(), NodeID: f.GetNodeId(), Workspace: &f.Workspace,
			Node: &f.NodeName,
		}
	}, items, next, err)
}

// Finding returns one finding by id, open or resolved.
func (s *Snapshot) Finding(ctx context.Context, id string) (*lifecyclev1.Finding, error) {
	found, _, err := s.Findings(ctx, FindingFilter{ID: id, Resolved: true}, list.Page{Size: 1})
	return only(found, err, "finding", id)
}

// FindingCounts are the open findings by severity.
type FindingCounts struct {
	P0 int32 `db:"p0"`
	P1 int32 `db:"p1"`
	P2 int32 `db:"p2"`
}

var countFindings = pg.Define(pg.RoleReadmodel, "view.count_findings", `
	SELECT count(*) FILTER (WHERE f.severity = 'p0') AS p0, count(*) FILTER (WHERE f.severity = 'p1') AS p1,
		count(*) FILTER (WHERE f.severity = 'p2') AS p2 FROM readmodel.finding f WHERE f.open`)

var findingsOfWorkspace = pg.Define(pg.RoleReadmodel, "view.findings_of_workspace", `
	SELECT f.body FROM readmodel.finding f WHERE f.workspace_id = $1::uuid AND f.open ORDER BY f.finding_id DESC LIMIT 20`)

// FindingCounts counts the open findings; none for a scope that is bound to a tenant.
func (s *Snapshot) FindingCounts(ctx context.Context) (FindingCounts, error) {
	if !s.scope.Everything() {
		return FindingCounts{}, nil
	}
	c, err := pg.One[FindingCounts](ctx, s.tx, countFindings)
	if err != nil {
		return c, fmt.Errorf("count findings: %w", err)
	}
	return c, nil
}

// WithFindings adds the open findings to a workspace, newest first.
func (s *Snapshot) WithFindings(ctx context.Context, w *readmodelv1.Workspace) error {
	if w == nil || !s.scope.Everything() {
		return nil
	}
	bodies, err := pg.Values[[]byte](ctx, s.tx, findingsOfWorkspace, w.GetWorkspaceId())
	if err != nil {
		return fmt.Errorf("read findings of workspace: %w", err)
	}
	if w.Findings, err = fromBodies[lifecyclev1.Finding](bodies); err != nil {
		return fmt.Errorf("read findings of workspace: %w", err)
	}
	return nil
}
