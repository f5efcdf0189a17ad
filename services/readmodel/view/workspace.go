package view

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// WorkspaceFilter narrows a list of workspaces. Zero fields do not.
type WorkspaceFilter struct {
	Tenant  string // name or id
	State   commonv1.WorkspaceState
	ID      string
	Name    string
	IDs     []string // nil: any
	NotOver bool     // without the decommissioned
}

// workspaceFrom joins a workspace with the run that stands in it (its run_id, else its newest), with whether a step of that run stalls, and with the
// node whose agent acts for it. $1 and $2 are those of nodeSession.
const workspaceFrom = `readmodel.workspace w
	LEFT JOIN LATERAL (
		SELECT x.run_id, x.body, x.live FROM readmodel.run x WHERE x.workspace_id = w.workspace_id
		ORDER BY (x.run_id::text = w.body->>'run_id') DESC, x.run_id DESC LIMIT 1) r ON true
	LEFT JOIN readmodel.node n ON n.node_id = w.node_id
	LEFT JOIN readmodel.observed o ON o.workspace_id = w.workspace_id AND o.node_id = w.node_id AND w.state = 'active'
		AND o.body @? '$.workloads[*] ? (@.crash_loop == true || @.phase == "WORKLOAD_PHASE_EXITED")'` + nodeSession

// A run says that its step stalls until that step has succeeded or moved, over all its attempts. Beside it stands whether any attempt has stalled since the
// workspace last came up, for one that is being provisioned.
const workspaceColumns = `w.body, r.body, COALESCE(r.live AND (r.body->>'stuck_reason' LIKE 'step_stalled%' OR EXISTS (
		SELECT FROM readmodel.step t WHERE t.run_id = r.run_id AND t.stalled)), false),
	w.state = 'provisioning' AND EXISTS (SELECT FROM readmodel.run x JOIN readmodel.step t ON t.run_id = x.run_id
		WHERE x.workspace_id = w.workspace_id AND t.direction = 'do' AND t.body @> '{"stalled": true}' AND NOT EXISTS (
			SELECT FROM readmodel.run y WHERE y.workspace_id = x.workspace_id AND y.run_id >= x.run_id AND y.body->>'state' = 'RUN_STATE_SUCCEEDED')), o.body, ` + nodeColumns

// Workspaces answers one page by tenant and name.
func (s *Snapshot) Workspaces(ctx context.Context, f WorkspaceFilter, page Page) ([]*readmodelv1.Workspace, string, error) {
	listening, err := s.listeningSince(ctx)
	if err != nil {
		return nil, "", err
	}
	l := listing{
		name: "workspaces", columns: workspaceColumns, from: workspaceFrom, sort: "w.tenant || '/' || w.name", id: "w.workspace_id",
		args: []any{s.Now, BeatFresh},
	}
	l.and("(?::uuid IS NULL OR w.tenant_id = $3)", s.scope.arg())
	if f.Tenant != "" {
		if isUUID(f.Tenant) {
			l.and("(w.tenant = ? OR w.tenant_id = ?::uuid)", f.Tenant, f.Tenant)
		} else {
			l.and("w.tenant = ?", f.Tenant)
		}
	}
	if f.State != commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED {
		l.and("w.state = ?", names.Of(f.State))
	}
	if f.NotOver {
		l.and("w.state <> 'decommissioned'")
	}
	if f.ID != "" {
		l.and("w.workspace_id = ?::uuid", optional(f.ID))
	}
	if f.Name != "" {
		l.and("w.name = ?", f.Name)
	}
	if f.IDs != nil {
		l.and("w.workspace_id = ANY(?::uuid[])", f.IDs)
	}
	return run(ctx, s, l, page, func(row pgx.Row, lead ...any) (*readmodelv1.Workspace, error) {
		return s.scanWorkspace(row, listening, lead...)
	})
}

func (s *Snapshot) scanWorkspace(row pgx.Row, listening time.Time, lead ...any) (*readmodelv1.Workspace, error) {
	var body, runBody, observed []byte
	var n nodeScan
	var f WorkspaceFacts
	if err := row.Scan(append(append(lead, &body, &runBody, &f.Stalled, &f.HasStalled, &observed), n.into()...)...); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	f.Workspace = &lifecyclev1.Workspace{}
	r := &lifecyclev1.Run{}
	if err := project.Decode(body, f.Workspace); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	if err := project.Decode(runBody, r); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by run
	}
	w := f.Workspace
	over, active := w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	if w.GetNodeId() != "" && !over {
		facts, err := n.facts(listening, s.staleAfter)
		if err != nil {
			return nil, err
		}
		f.Agent = DescribeAgent(facts, s.Now)
	}
	switch {
	case !active:
		f.Agent.Reason, f.Agent.Detail = "", "" // what else it is doing tells more than an agent that comes or goes with it
	case w.GetRegisterFailures() > 0:
		f.Agent.Reason, f.Agent.Detail = describeRegistering(w)
	}
	if observed != nil && active && f.Agent.Reason == "" && f.Agent.Connected {
		seen := &nodev1.Observation{}
		if err := project.Decode(observed, seen); err != nil {
			return nil, err //nolint:wrapcheck // wrapped by run
		}
		f.Workloads = DescribeWorkloads(w, seen)
	}
	out := &readmodelv1.Workspace{
		WorkspaceId: w.GetWorkspaceId(), Name: w.GetName(), Tenant: w.GetTenant(), TenantId: w.GetTenantId(), State: w.GetState(),
		UserState: DescribeWorkspace(f), Epoch: w.GetEpoch(), LastError: w.GetLastError(), LastErrorCode: w.GetLastErrorCode(), RunId: w.GetRunId(),
		Spec: w.GetSpec(), NodeId: w.GetNodeId(), NodeName: w.GetNodeName(), Endpoints: w.GetEndpoints(), RegisterFailures: w.GetRegisterFailures(),
		CreatedAt: w.GetCreatedAt(), StateAt: w.GetStateAt(), Stalled: f.Stalled, Version: w.GetVersion(), CreatedBy: w.GetCreatedBy(),
		AgentConnected: f.Agent.Connected, AgentSince: stamp(f.Agent.Since), Reason: f.Agent.Reason, AgentDetail: f.Agent.Detail,
		WorkloadReason: f.Workloads.Reason, WorkloadDetail: f.Workloads.Detail, NextAction: f.Workloads.NextAction,
	}
	if r.GetRunId() != "" && project.LiveRun(r.GetState()) {
		out.WhyWaiting = r.GetWhyWaiting()
		if step := int(r.GetStep()); step >= 0 && step < len(r.GetStepNames()) {
			out.CurrentStep = r.GetStepNames()[step]
		}
	}
	return out, nil
}

// WorkspacesOn answers which workspaces that live name one of the nodes: the node's id, by the workspace's.
func (s *Snapshot) WorkspacesOn(ctx context.Context, nodeIDs []string) (map[string]string, error) {
	rows, err := s.tx.Query(ctx, `SELECT w.workspace_id::text, w.node_id::text FROM readmodel.workspace w
		WHERE w.node_id = ANY($1::uuid[]) AND w.state <> 'decommissioned' AND ($2::uuid IS NULL OR w.tenant_id = $2)`, nodeIDs, s.scope.arg())
	if err != nil {
		return nil, fmt.Errorf("read workspaces of nodes: %w", err)
	}
	found := map[string]string{}
	var workspace, node string
	if _, err := pgx.ForEachRow(rows, []any{&workspace, &node}, func() error { found[workspace] = node; return nil }); err != nil {
		return nil, fmt.Errorf("read workspaces of nodes: %w", err)
	}
	return found, nil
}

// Tenants answers one page by name.
func (s *Snapshot) Tenants(ctx context.Context, page Page) ([]*lifecyclev1.Tenant, string, error) {
	l := listing{name: "tenants", columns: "t.body", from: "readmodel.tenant t", sort: "t.name", id: "t.tenant_id"}
	l.and("(?::uuid IS NULL OR t.tenant_id = $1)", s.scope.arg())
	return run(ctx, s, l, page, scanBody[lifecyclev1.Tenant])
}

// Tenant finds one by name, by id or by a part of the id.
func (s *Snapshot) Tenant(ctx context.Context, ref string) (*lifecyclev1.Tenant, error) {
	id, err := s.lookUp(ctx, readmodelv1.ObjectKind_OBJECT_KIND_TENANT, ref)
	if err != nil {
		return nil, err
	}
	l := listing{name: "tenants", columns: "t.body", from: "readmodel.tenant t", sort: "t.name", id: "t.tenant_id"}
	l.and("(?::uuid IS NULL OR t.tenant_id = $1)", s.scope.arg())
	l.and("t.tenant_id = ?::uuid", id)
	found, _, err := run(ctx, s, l, Page{Size: 1}, scanBody[lifecyclev1.Tenant])
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("tenant")
	}
	return found[0], nil
}

// Counts are the sums of a status page.
type Counts struct{ Nodes, Connected, Workspaces, Active, LiveRuns int32 }

// Counts sums what the scope meets.
func (s *Snapshot) Counts(ctx context.Context) (Counts, error) {
	var c Counts
	err := s.tx.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE s.connected) FROM `+nodeFrom+`
		WHERE n.state <> 'retired' AND ($3::uuid IS NULL OR n.tenant_id = $3)`, s.Now, BeatFresh, s.scope.arg()).Scan(&c.Nodes, &c.Connected)
	if err != nil {
		return c, fmt.Errorf("count nodes: %w", err)
	}
	err = s.tx.QueryRow(ctx, `SELECT
		(SELECT count(*) FROM readmodel.workspace w WHERE w.state <> 'decommissioned' AND ($1::uuid IS NULL OR w.tenant_id = $1)),
		(SELECT count(*) FROM readmodel.workspace w WHERE w.state = 'active' AND ($1::uuid IS NULL OR w.tenant_id = $1)),
		(SELECT count(*) FROM readmodel.run r WHERE r.live AND ($1::uuid IS NULL OR r.tenant_id = $1))`, s.scope.arg()).
		Scan(&c.Workspaces, &c.Active, &c.LiveRuns)
	if err != nil {
		return c, fmt.Errorf("count workspaces: %w", err)
	}
	return c, nil
}

// Era of the database.
func (s *Snapshot) Era(ctx context.Context) (int64, error) {
	return pg.Era(ctx, s.tx) //nolint:wrapcheck // it says what
}

// RolledBack reports whether rollback mode is active, as the database has it now and not as events told.
func (s *Snapshot) RolledBack(ctx context.Context) (bool, error) {
	var active bool
	if err := s.tx.QueryRow(ctx, "SELECT mesh.rolled_back()").Scan(&active); err != nil {
		return false, fmt.Errorf("read rollback mode: %w", err)
	}
	return active, nil
}

// Schema is the version of the database's schema.
func (s *Snapshot) Schema(ctx context.Context) (string, error) {
	var version int64
	if err := s.tx.QueryRow(ctx, `SELECT COALESCE(max(version_id), 0) FROM mesh.goose_db_version WHERE is_applied`).Scan(&version); err != nil {
		return "", fmt.Errorf("read schema version: %w", err)
	}
	return fmt.Sprintf("%05d", version), nil
}
