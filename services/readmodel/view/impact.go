package view

import (
	"context"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// Touched is a workspace with how its layers are touched now, and, if one is, with what else its impacts name.
type Touched struct {
	Workspace *lifecyclev1.Workspace // shared with other requests: it must not be changed
	status.Impacts
	AllocationID string                  // that it has; empty: none
	Verdict      *recoveryv1.NodeVerdict // about its node; nil: none
	IncidentID   string                  // of the open fleet incident that names its node; empty: none
}

var (
	allocationsOfWorkspaces = pg.Define(pg.RoleReadmodel, "view.allocations_of_workspaces", `
		SELECT DISTINCT ON (a.workspace_id) a.workspace_id::text AS id, a.allocation_id::text AS text
		FROM readmodel.allocation a
		WHERE a.workspace_id = ANY($1::uuid[]) AND a.body->>'state' IS DISTINCT FROM 'ALLOCATION_STATE_RELEASED'
		ORDER BY a.workspace_id, a.allocation_id DESC`)
	verdictsOfNodes = pg.Define(pg.RoleReadmodel, "view.verdicts_of_nodes", `
		SELECT v.node_id::text AS id, v.body::text AS text FROM readmodel.verdict v WHERE v.node_id = ANY($1::uuid[])`)
	// An incident of equal verdicts covers the nodes whose verdict has its reason, of which it names some alone. One of an
	// earlier build has no reason.
	incidentsOfNodes = pg.Define(pg.RoleReadmodel, "view.incidents_of_nodes", `
		SELECT n.id, max(x.incident_id::text) AS text
		FROM readmodel.incident x CROSS JOIN unnest($1::text[]) n (id)
		WHERE x.open AND x.body->>'kind' = 'INCIDENT_KIND_FLEET_DRIFT' AND (x.body->'node_ids' ? n.id
			OR x.body->>'error_code' = (SELECT lower(replace(v.body->>'reason', 'DRIFT_REASON_', ''))
				FROM readmodel.verdict v WHERE v.node_id = n.id::uuid))
		GROUP BY n.id`)
)

// Touched returns one page of workspaces with how their layers are touched, from the rows and by the functions that
// Workspaces describes them with.
func (s *Snapshot) Touched(ctx context.Context, f WorkspaceFilter, page list.Page) ([]Touched, string, error) {
	rows, parts, next, err := s.kept.rows(ctx, s.tx, s.scope, s.Now, f, page)
	if err != nil {
		return nil, "", err
	}
	out := make([]Touched, len(rows))
	var workspaces, nodes []string
	for i := range rows {
		out[i] = Touched{Workspace: parts[i].workspace, Impacts: status.DescribeImpacts(describe(&rows[i], &parts[i]))}
		if len(out[i].Touched) > 0 {
			workspaces = append(workspaces, out[i].Workspace.GetWorkspaceId())
			nodes = append(nodes, out[i].Workspace.GetNodeId())
		}
	}
	if len(workspaces) == 0 {
		return out, next, nil
	}
	allocations, err := list.Pairs(ctx, s.tx, allocationsOfWorkspaces, workspaces)
	if err != nil {
		return nil, "", fmt.Errorf("read allocations of workspaces: %w", err)
	}
	verdicts, err := s.verdictsOf(ctx, nodes)
	if err != nil {
		return nil, "", err
	}
	incidents, err := list.Pairs(ctx, s.tx, incidentsOfNodes, nodes)
	if err != nil {
		return nil, "", fmt.Errorf("read incidents of nodes: %w", err)
	}
	for i := range out {
		if len(out[i].Touched) > 0 {
			w := out[i].Workspace
			out[i].AllocationID, out[i].IncidentID = allocations[w.GetWorkspaceId()], incidents[w.GetNodeId()]
			out[i].Verdict = verdicts[w.GetNodeId()]
		}
	}
	return out, next, nil
}

// verdictsOf returns the verdicts about nodes that name a reason, by the ids of the nodes.
func (s *Snapshot) verdictsOf(ctx context.Context, nodes []string) (map[string]*recoveryv1.NodeVerdict, error) {
	bodies, err := list.Pairs(ctx, s.tx, verdictsOfNodes, nodes)
	if err != nil {
		return nil, fmt.Errorf("read verdicts of nodes: %w", err)
	}
	out := make(map[string]*recoveryv1.NodeVerdict, len(bodies))
	for node, body := range bodies {
		v, err := decode[recoveryv1.NodeVerdict]([]byte(body))
		if err != nil {
			return nil, fmt.Errorf("read verdicts of nodes: %w", err)
		}
		if v.GetReason() != commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED {
			out[node] = v
		}
	}
	return out, nil
}
