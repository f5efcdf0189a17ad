package view

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype/zeronull"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/project"
	"github.com/gpuaas/mesh/services/readmodel/status"
	"github.com/gpuaas/mesh/services/readmodel/view/decoded"
)

// WorkspaceFilter narrows a list of workspaces. Zero fields do not.
type WorkspaceFilter struct {
	Tenant  string // name or id
	State   commonv1.WorkspaceState
	ID      string
	NodeID  string // the machine that they are on
	Name    string
	IDs     []string // nil: any
	NotOver bool     // without the decommissioned
}

// workspaceFrom joins a workspace with its current run (its run_id, else its newest), with whether a step of that run
// stalls, and with the node whose agent acts for it. The joined rows are looked up for each row of the page: subqueries
// with a LIMIT are neither flattened nor hashed, which would read all that is observed, or all steps, for a page of
// eight.
var workspaceFrom = `readmodel.workspace w
	LEFT JOIN LATERAL (
		SELECT x.run_id, x.version, x.xmin, x.body, x.live FROM readmodel.run x WHERE x.workspace_id = w.workspace_id
		ORDER BY (x.run_id::text = w.body->>'run_id') DESC, x.run_id DESC LIMIT 1) r ON true
	LEFT JOIN readmodel.node n ON n.node_id = w.node_id
	LEFT JOIN LATERAL (
		SELECT x.version, x.xmin FROM readmodel.observed x
		WHERE x.workspace_id = w.workspace_id AND x.node_id = w.node_id AND w.state = 'active'
		LIMIT 1) o ON true
	LEFT JOIN readmodel.verdict v ON v.node_id = w.node_id` + nodeSession("(SELECT a.now FROM at a)")

// workspaceRow is a workspace of a page: the keys of the rows that it is made of, and the values that the database
// derives from them. The decoded bodies of these rows are kept by their keys, and read if they are missing. A step of a
// run counts as stalled until that step has succeeded or the run has moved on, over all its attempts. HasStalled is
// whether any attempt has stalled since the workspace last came up, for one that is being provisioned.
type workspaceRow struct {
	list.Place
	workspaceKeys
}

type workspaceKeys struct {
	WorkspaceID rowID     `db:"workspace_id"`
	Version     int64     `db:"version"`
	Xmin        uint32    `db:"xmin"`
	NodeID      rowID     `db:"node_id"`
	RunID       rowID     `db:"run_id" expr:"r.run_id"`
	RunVersion  int64     `db:"run_version" expr:"COALESCE(r.version, 0)"`
	RunXmin     uint32    `db:"run_xmin" expr:"COALESCE(r.xmin, '0')"`
	SeenVersion *int64    `db:"seen_version" expr:"o.version"`
	SeenXmin    uint32    `db:"seen_xmin" expr:"COALESCE(o.xmin, '0')"`
	Now         time.Time `db:"now" expr:"(SELECT a.now FROM at a)"`
	// Verdict and ControlPlane are the reasons of the verdicts about the node and about the control plane, and Evidence
	// those of the evidence about the node that is not over.
	Verdict      string   `db:"verdict" expr:"COALESCE(v.body->>'reason', '')"`
	Evidence     []string `db:"evidence" expr:"ARRAY(SELECT e.value->>'reason' {evidence} (SELECT a.now FROM at a))"`
	ControlPlane string   `db:"control_plane" expr:"(SELECT a.control_plane FROM at a)"`
	Ours         []string `db:"ours" expr:"(SELECT a.ours FROM at a)"` // reasons that are an incident of the fleet
	// JudgedThrough is the time up to which recovery has judged everything; nil: it has never noted such a time.
	JudgedThrough *time.Time `db:"judged_through" expr:"(SELECT a.judged FROM at a)"`
	// VerdictStale is since when the verdict about the node is stale by itself; nil: it is not.
	VerdictStale *time.Time `db:"verdict_stale" expr:"(v.body->>'stale_since')::timestamptz"`
	Stalled      bool       `db:"stalled" expr:"COALESCE(r.live AND {stalled}, false)"`
	HasStalled   bool       `db:"has_stalled" expr:"COALESCE(w.state = 'provisioning' AND ({has_stalled}), false)"`
	nodeKeys
}

// evidenceHeld is, with a time after it, the evidence of a verdict v that has a reason and is not over at that time.
const evidenceHeld = `FROM jsonb_array_elements(v.body->'evidence') e
	WHERE e.value->>'reason' IS NOT NULL AND COALESCE((e.value->>'fresh_until')::timestamptz, 'infinity') >=`

var workspaceColumns = strings.NewReplacer(
	"{evidence}", evidenceHeld,
	"{stalled}", `(r.body->>'stuck_reason' LIKE 'step_stalled%' OR (
		SELECT true FROM readmodel.step t WHERE t.run_id = r.run_id AND t.stalled LIMIT 1))`,
	"{has_stalled}", `SELECT true FROM readmodel.run x JOIN readmodel.step t ON t.run_id = x.run_id
		WHERE x.workspace_id = w.workspace_id AND t.direction = 'do' AND t.body @> '{"stalled": true}' AND NOT EXISTS (
			SELECT FROM readmodel.run y WHERE y.workspace_id = x.workspace_id AND y.run_id >= x.run_id
				AND y.body->>'state' = 'RUN_STATE_SUCCEEDED') LIMIT 1`,
).Replace(pg.Columns[workspaceKeys]("w"))

const (
	workspacesOfTenant     list.Condition = "w.tenant = ?"
	workspacesOfTenantOrID list.Condition = "(w.tenant = ? OR w.tenant_id = ?::uuid)"
	workspacesInState      list.Condition = "w.state = ?"
	workspacesNotOver      list.Condition = "w.state <> 'decommissioned'"
	theWorkspace           list.Condition = "w.workspace_id = ?::uuid"
	workspacesOnNode       list.Condition = "w.node_id = ?::uuid"
	workspacesOfName       list.Condition = "w.name = ?"
	workspacesByID         list.Condition = "w.workspace_id = ANY(?::uuid[])"
)

// fleetReasons are the reasons of which there is an open incident of equal verdicts.
const fleetReasons = `ARRAY(SELECT i.body->>'error_code' FROM readmodel.incident i
	WHERE i.open AND i.body->>'kind' = 'INCIDENT_KIND_FLEET_DRIFT' AND i.body->>'error_code' IS NOT NULL)`

var workspaceLayout = list.Layout{
	Name: "workspaces", With: `at AS MATERIALIZED (SELECT COALESCE($1::timestamptz, mesh.clock()) AS now,
		COALESCE((SELECT x.body->>'reason' FROM readmodel.verdict x
			WHERE x.node_id = '00000000-0000-0000-0000-000000000000'), '') AS control_plane, ` + fleetReasons + ` AS ours,
		(SELECT j.through FROM mesh.judged j WHERE j.service = 'recovery') AS judged)`,
	Columns: workspaceColumns, From: workspaceFrom, Sort: "w.tenant || '/' || w.name", ID: "w.workspace_id",
	Lead: 3, Tenant: "w.tenant_id",
	Conditions: []list.Condition{
		workspacesOfTenant, workspacesOfTenantOrID, workspacesInState, workspacesNotOver, theWorkspace, workspacesOnNode,
		workspacesOfName, workspacesByID,
	},
}

var listWorkspaces = pg.DefineDynamic(pg.RoleReadmodel, "view.list_workspaces", workspaceLayout.Compose,
	workspaceLayout.Samples()...)

// Workspaces returns one page, ordered by tenant and name.
func (s *Snapshot) Workspaces(ctx context.Context, f WorkspaceFilter, page list.Page) ([]*readmodelv1.Workspace, string,
	error,
) {
	return s.kept.page(ctx, s.tx, s.scope, s.Now, f, page)
}

// Workspaces returns one page, ordered by tenant and name, as of one moment during the call. It needs no snapshot if
// the messages that the page is made of are kept: one statement reads the keys of their rows. Another one reads the
// rows that are not kept, and if one of them has changed in between, the page is read again in a snapshot.
func (r *Reader) Workspaces(
	ctx context.Context, scope list.Scope, f WorkspaceFilter, page list.Page,
) ([]*readmodelv1.Workspace, string, error) {
	once, cancel := context.WithTimeout(ctx, onceTimeout)
	defer cancel()
	items, next, err := r.kept.page(once, r.db, scope, time.Time{}, f, page)
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return nil, "", tookTooLong(err)
	case !errors.Is(err, decoded.ErrChanged):
		return items, next, refusal(err)
	}
	err = r.Read(ctx, scope, func(ctx context.Context, s *Snapshot) error {
		items, next, err = s.Workspaces(ctx, f, page)
		return err
	})
	return items, next, err
}

// page reads the keys of the rows that a page is made of, and the bodies that are not kept. A zero now means the time
// of the statement.
func (b *bodies) page(
	ctx context.Context, db pg.Querier, scope list.Scope, now time.Time, f WorkspaceFilter, page list.Page,
) ([]*readmodelv1.Workspace, string, error) {
	rows, parts, next, err := b.rows(ctx, db, scope, now, f, page)
	var items []*readmodelv1.Workspace
	for i := range rows {
		items = append(items, list.Shown(scope, readWorkspace(&rows[i], &parts[i])))
	}
	return items, next, err
}

// rows is page without making the workspaces of the rows.
func (b *bodies) rows(
	ctx context.Context, db pg.Querier, scope list.Scope, now time.Time, f WorkspaceFilter, page list.Page,
) ([]workspaceRow, []workspaceParts, string, error) {
	l := list.Request{
		Layout: &workspaceLayout, Statement: listWorkspaces,
		Args: []any{zeronull.Timestamptz(now), BeatFresh, scope.Arg()},
	}
	narrow(&l, f)
	rows, next, err := list.Read(l, scope, page, func(statement *pg.Statement, args ...any) ([]workspaceRow, error) {
		return pg.All[workspaceRow](ctx, db, statement, args...)
	})
	if err != nil {
		return nil, nil, "", err
	}
	parts := make([]workspaceParts, len(rows))
	var missing missingBodies
	for i := range rows {
		b.find(&rows[i], &parts[i], &missing)
	}
	if missing.n > 0 {
		if err := b.load(ctx, db, &missing); err != nil {
			return nil, nil, "", fmt.Errorf("list workspaces: %w", err)
		}
	}
	return rows, parts, next, nil
}

// narrow adds the conditions of a filter to the request.
func narrow(l *list.Request, f WorkspaceFilter) {
	if f.Tenant != "" {
		if list.IsID(f.Tenant) {
			l.And(workspacesOfTenantOrID, f.Tenant, f.Tenant)
		} else {
			l.And(workspacesOfTenant, f.Tenant)
		}
	}
	l.When(f.State != commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED, workspacesInState, names.Of(f.State))
	l.When(f.NotOver, workspacesNotOver)
	l.When(f.ID != "", theWorkspace, list.OptionalID(f.ID))
	l.When(f.NodeID != "", workspacesOnNode, list.OptionalID(f.NodeID))
	l.When(f.Name != "", workspacesOfName, f.Name)
	l.When(f.IDs != nil, workspacesByID, f.IDs)
}

// ofReasons returns a verdict that has only its reason and those of its evidence, which are all that a workspace shows;
// nil if it has none.
func ofReasons(reason string, evidence ...string) *recoveryv1.NodeVerdict {
	value, ok := commonv1.DriftReason_value[reason]
	if !ok {
		return nil
	}
	v := &recoveryv1.NodeVerdict{Reason: commonv1.DriftReason(value)}
	for _, each := range evidence {
		v.Evidence = append(v.Evidence, &recoveryv1.Evidence{Reason: commonv1.DriftReason(commonv1.DriftReason_value[each])})
	}
	return v
}

// parseReasons returns reasons that incidents name, without those of a newer build.
func parseReasons(texts []string) []commonv1.DriftReason {
	var out []commonv1.DriftReason
	for _, text := range texts {
		if reason, err := names.Parse[commonv1.DriftReason](text); err == nil {
			out = append(out, reason)
		}
	}
	return out
}

// describe returns the facts that a workspace is described from, and its layers.
func describe(row *workspaceRow, parts *workspaceParts) (status.WorkspaceFacts, status.Layers) {
	w := parts.workspace
	f := status.WorkspaceFacts{Workspace: w, Stalled: row.Stalled, HasStalled: row.HasStalled}
	over, active := w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		w.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	if w.GetNodeId() != "" && !over {
		facts := status.NodeFacts{
			Identity: parts.identity, Gate: parts.gate, Session: parts.session,
			Since: row.Since, Connected: row.Connected,
			Verdict: ofReasons(row.Verdict, row.Evidence...), ControlPlane: ofReasons(row.ControlPlane),
			Ours: parseReasons(row.Ours),
		}
		if row.BeatAt != nil {
			facts.BeatAt = *row.BeatAt
		}
		f.Agent = status.DescribeAgent(facts)
	}
	agent := f.Agent
	switch {
	case !active:
		// its operation explains more than the agent, which may come or go with the operation
		f.Agent.Reason, f.Agent.Detail = "", ""
	case w.GetRegisterFailures() > 0:
		f.Agent.Reason, f.Agent.Detail = status.DescribeRegistering(w)
		agent = f.Agent
	}
	layers := status.DescribeLayers(status.LayerFacts{Workspace: w, Agent: agent, Seen: parts.seen})
	if active && f.Agent.Reason == "" && f.Agent.Connected {
		if since := parts.seen.GetStaleSince(); since != nil {
			f.Agent.Detail = "the agent has not reported its workloads since " + since.AsTime().UTC().Format(time.RFC3339) +
				": what they do now is not known"
		} else {
			f.Workloads = status.DescribeWorkloads(w, parts.seen)
		}
	}
	return f, layers
}

// readWorkspace returns a new message whose parts are shared with other requests.
func readWorkspace(row *workspaceRow, parts *workspaceParts) *readmodelv1.Workspace {
	w, r := parts.workspace, parts.run
	f, layers := describe(row, parts)
	out := &readmodelv1.Workspace{
		WorkspaceId: w.GetWorkspaceId(), Name: w.GetName(), Tenant: w.GetTenant(), TenantId: w.GetTenantId(),
		State: w.GetState(), UserState: status.DescribeWorkspace(f), Epoch: w.GetEpoch(), LastError: w.GetLastError(),
		LastErrorCode: w.GetLastErrorCode(), RunId: w.GetRunId(), Spec: w.GetSpec(), NodeId: w.GetNodeId(),
		NodeName: w.GetNodeName(), Endpoints: w.GetEndpoints(), RegisterFailures: w.GetRegisterFailures(),
		CreatedAt: w.GetCreatedAt(), StateAt: w.GetStateAt(), Stalled: f.Stalled, Version: w.GetVersion(),
		CreatedBy: w.GetCreatedBy(), AgentConnected: f.Agent.Connected, AgentSince: stamp(f.Agent.Since),
		Reason: f.Agent.Reason, AgentDetail: f.Agent.Detail,
		WorkloadReason: f.Workloads.Reason,
		WorkloadDetail: f.Workloads.Detail,
		NextAction:     f.Workloads.NextAction,
		Management:     layers.Management, Runtime: layers.Runtime, Edge: layers.Edge,
	}
	out.UserText = status.TextOf(w, out.GetUserState())
	if w.GetNodeId() != "" && w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED {
		since := status.EarlierStale(status.StaleSince(row.JudgedThrough, row.Now), row.VerdictStale)
		if out.VerdictStaleSince = stamp(since); !since.IsZero() {
			out.UserText += " " + status.StaleText(since)
		}
	}
	if r.GetRunId() != "" && project.LiveRun(r.GetState()) {
		out.WhyWaiting = r.GetWhyWaiting()
		if step := int(r.GetStep()); step >= 0 && step < len(r.GetStepNames()) {
			out.CurrentStep = r.GetStepNames()[step]
		}
	}
	return out
}

var workspacesOnNodes = pg.Define(pg.RoleReadmodel, "view.workspaces_on_nodes", `
	SELECT w.workspace_id::text AS id, w.node_id::text AS text FROM readmodel.workspace w
	WHERE w.node_id = ANY($1::uuid[]) AND w.state <> 'decommissioned' AND ($2::uuid IS NULL OR w.tenant_id = $2)`)

// WorkspacesOn returns the live workspaces that are on one of the nodes: the node's id, by the workspace's id.
func (s *Snapshot) WorkspacesOn(ctx context.Context, nodeIDs []string) (map[string]string, error) {
	found, err := list.Pairs(ctx, s.tx, workspacesOnNodes, nodeIDs, s.scope.Arg())
	if err != nil {
		return nil, fmt.Errorf("read workspaces of nodes: %w", err)
	}
	return found, nil
}

// Workspace returns one workspace by id, by tenant/name, by a bare name that exactly one workspace has, or by a part of
// the id. A name means the live workspace; only if none is live, the last that was decommissioned.
func (s *Snapshot) Workspace(ctx context.Context, ref string) (*readmodelv1.Workspace, error) {
	id, err := s.find().IDOf(ctx, readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE, ref)
	if err != nil {
		return nil, err
	}
	found, _, err := s.Workspaces(ctx, WorkspaceFilter{ID: id}, list.Page{Size: 1})
	return only(found, err, "workspace", ref)
}
