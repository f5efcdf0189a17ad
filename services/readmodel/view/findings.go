package view

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// FindingFilter narrows a list of findings. Zero fields do not.
type FindingFilter struct {
	WorkspaceID string
	Resolved    bool // those that are over as well
	ID          string
}

// Findings answers one page, newest first. They speak of machines and of other tenants' neighbours: who is bound to a tenant is refused.
func (s *Snapshot) Findings(ctx context.Context, f FindingFilter, page Page) ([]*lifecyclev1.Finding, string, error) {
	if !s.scope.Everything() {
		return nil, "", operatorsOnly()
	}
	l := listing{name: "findings", columns: "x.body", from: "readmodel.finding x", id: "x.finding_id"}
	if f.WorkspaceID != "" {
		l.and("x.workspace_id = ?::uuid", optional(f.WorkspaceID))
	}
	if f.ID != "" {
		l.and("x.finding_id = ?::uuid", f.ID)
	}
	if !f.Resolved {
		l.and("x.open")
	}
	items, next, err := run(ctx, s, l, page, scanBody[lifecyclev1.Finding])
	return namedPage(ctx, s, func(f *lifecyclev1.Finding) nameless {
		return nameless{workspaceID: f.GetWorkspaceId(), nodeID: f.GetNodeId(), workspace: &f.Workspace, node: &f.NodeName}
	}, items, next, err)
}

// Finding answers one finding, open or over.
func (s *Snapshot) Finding(ctx context.Context, id string) (*lifecyclev1.Finding, error) {
	found, _, err := s.Findings(ctx, FindingFilter{ID: id, Resolved: true}, Page{Size: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("finding")
	}
	return found[0], nil
}

// FindingCounts are the open findings by severity.
type FindingCounts struct{ P0, P1, P2 int32 }

// FindingCounts counts them, none for who is bound to a tenant.
func (s *Snapshot) FindingCounts(ctx context.Context) (FindingCounts, error) {
	var c FindingCounts
	if !s.scope.Everything() {
		return c, nil
	}
	err := s.tx.QueryRow(ctx, `SELECT count(*) FILTER (WHERE f.severity = 'p0'), count(*) FILTER (WHERE f.severity = 'p1'),
		count(*) FILTER (WHERE f.severity = 'p2') FROM readmodel.finding f WHERE f.open`).Scan(&c.P0, &c.P1, &c.P2)
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
	rows, err := s.tx.Query(ctx, `SELECT f.body FROM readmodel.finding f WHERE f.workspace_id = $1 AND f.open ORDER BY f.finding_id DESC LIMIT 20`, w.GetWorkspaceId())
	if err != nil {
		return fmt.Errorf("read findings of workspace: %w", err)
	}
	w.Findings, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (*lifecyclev1.Finding, error) {
		var body []byte
		if err := row.Scan(&body); err != nil {
			return nil, err //nolint:wrapcheck // wrapped below
		}
		m := &lifecyclev1.Finding{}
		return m, project.Decode(body, m)
	})
	if err != nil {
		return fmt.Errorf("read findings of workspace: %w", err)
	}
	return nil
}
