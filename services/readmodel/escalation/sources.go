package escalation

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// sources are the files in the order in which they are read: the later ones use what the earlier ones found.
func (g *gathering) sources() []source {
	id := g.req.Workspace.GetWorkspaceId()
	instances := view.PerWorkspaceFilter{WorkspaceID: id, Released: true}
	return []source{
		{"workspace.json", "the workspace", func(context.Context) (any, error) { return cleaned{g.req.Workspace}, nil }},
		{"same_name.json", "workspaces of the same tenant and name", g.sameName},
		{
			"runs.json", "the runs of all rounds",
			listed(g, &g.runs, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*lifecyclev1.Run, string, error) {
				return s.Runs(ctx, view.RunFilter{WorkspaceID: id}, p)
			}),
		},
		{"timeline.json", "the timeline", g.allTimelines},
		{
			"tasks.json", "the tasks and their transitions",
			listed(g, &g.tasks, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*readmodelv1.Task, string, error) {
				return s.Tasks(ctx, view.TaskFilter{WorkspaceID: id}, p)
			}),
		},
		{
			"claims.json", "the resource claims",
			listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*lifecyclev1.Claim, string, error) {
				return s.Claims(ctx, instances, p)
			}),
		},
		{
			"allocations.json", "the allocations",
			listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*lifecyclev1.Allocation, string, error) {
				list, next, err := s.Allocations(ctx, instances, p)
				for _, a := range list {
					g.sawNode(a.GetNodeId())
				}
				return list, next, err
			}),
		},
		{
			"instances.json", "the instances",
			listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*lifecyclev1.Instance, string, error) {
				list, next, err := s.Instances(ctx, instances, p)
				for _, i := range list {
					g.sawNode(i.GetNodeId())
				}
				return list, next, err
			}),
		},
		{"nodes.json", "the nodes, their sessions, facts and the agents' diagnostics", g.operators(g.readNodes)},
		{
			"audit.json", "the audit entries",
			listed(g, &g.trail, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*readmodelv1.AuditRow, string,
				error,
			) {
				return s.Audit(ctx, view.AuditFilter{WorkspaceID: id}, p)
			}),
		},
		{
			"findings.json", "the findings",
			g.operators(listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*lifecyclev1.Finding, string,
				error,
			) {
				return s.Findings(ctx, view.FindingFilter{WorkspaceID: id, Resolved: true}, p)
			})),
		},
		{
			"recoveries.json", "the recovery records",
			listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*recoveryv1.RecoveryRecord, string,
				error,
			) {
				return s.Recoveries(ctx, view.RecoveryFilter{WorkspaceID: id}, p)
			}),
		},
		{"incidents.json", "the incidents that speak of it", g.operators(g.incidents)},
		{"actions.json", "which operations are possible", g.actions},
		{"policy.json", "the policy in force", g.operators(g.policy)},
		{"versions.json", "the versions of all parts", g.operators(g.versions)},
		{"ids.json", "the ids", g.ids},
		{"summary.json", "the summary", g.summary},
	}
}

func (g *gathering) sawNode(id string) {
	if id != "" && !slices.Contains(g.nodeIDs, id) {
		g.nodeIDs = append(g.nodeIDs, id)
	}
}

// operators restricts a source to people who may see every tenant, because its content concerns machines, the mesh
// and other tenants.
func (g *gathering) operators(read func(context.Context) (any, error)) func(context.Context) (any, error) {
	return func(ctx context.Context) (any, error) {
		if !g.req.Scope.Everything() {
			return nil, &absent{Gap{Why: "it is for people of the operator", Next: "ask an operator to escalate"}}
		}
		return read(ctx)
	}
}

// incidents returns the incidents of the mesh that name the workspace.
func (g *gathering) incidents(ctx context.Context) (any, error) {
	every, err := all(ctx, g, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*recoveryv1.Incident, string,
		error,
	) {
		return s.Incidents(ctx, true, p)
	})
	if err != nil {
		return nil, err
	}
	return items(slices.DeleteFunc(every, func(i *recoveryv1.Incident) bool {
		return !slices.Contains(i.GetWorkspaceIds(), g.req.Workspace.GetWorkspaceId())
	})), nil
}

// sameName lists the workspaces that had the name, one after the other: successive provisions of one slug are a symptom
// by themselves.
func (g *gathering) sameName(ctx context.Context) (any, error) {
	w := g.req.Workspace
	return listed(g, nil, func(ctx context.Context, s *view.Snapshot, p list.Page) ([]*readmodelv1.Workspace, string,
		error,
	) {
		return s.Workspaces(ctx, view.WorkspaceFilter{Tenant: w.GetTenantId(), Name: w.GetName()}, p)
	})(ctx)
}

// round is one run with its timeline.
type round struct {
	RunID string    `json:"run_id"`
	Kind  string    `json:"kind"`
	Round int32     `json:"round"`
	State string    `json:"state"`
	Items []cleaned `json:"items"`
}

func (g *gathering) allTimelines(ctx context.Context) (any, error) {
	rounds := []round{}
	err := g.read(ctx, func(ctx context.Context, s *view.Snapshot) error {
		for _, r := range g.runs {
			attempts, err := s.Steps(ctx, []string{r.GetRunId()})
			if err != nil {
				return err
			}
			out := round{
				RunID: r.GetRunId(), Kind: names.Of(r.GetKind()), Round: r.GetRound(), State: names.Of(r.GetState()),
				Items: []cleaned{},
			}
			for _, item := range list.ShownAll(g.req.Scope, status.Timeline(r, attempts, s.Now)) {
				g.timeline = append(g.timeline, item)
				out.Items = append(out.Items, cleaned{item})
			}
			rounds = append(rounds, out)
		}
		return nil
	})
	return map[string]any{"items": rounds}, err
}

// readNodes reads the machines that the workspace is or was on, as far as the person may see them.
func (g *gathering) readNodes(ctx context.Context) (any, error) {
	g.sawNode(g.req.Workspace.GetNodeId())
	for _, t := range g.tasks {
		g.sawNode(t.GetNodeId())
	}
	for _, id := range g.nodeIDs {
		err := g.read(ctx, func(ctx context.Context, s *view.Snapshot) error {
			n, err := s.Node(ctx, id)
			if err == nil {
				g.nodes = append(g.nodes, n)
			}
			return err
		})
		switch {
		case fault.Has(err, commonv1.Reason_REASON_NOT_FOUND):
			g.bundle.lacks(Gap{
				What: "node " + id, Why: "it is not known here, or not the tenant's: a shared machine is shown to operators only",
				Next: "ask an operator to escalate",
			})
		case err != nil:
			return nil, err
		}
	}
	for _, n := range g.nodes {
		if len(n.GetSession().GetDiagnostics()) == 0 {
			g.bundle.lacks(Gap{
				What: "diagnostics of the agent on " + n.GetName(), Why: "its newest session brought none",
				Next: "gpuaas-node-agent diag, on the host",
			})
		}
		if !n.GetConnected() {
			g.bundle.lacks(Gap{
				What: "present facts of " + n.GetName(),
				Why:  "its agent is not connected: what is here is from its last session",
			})
		}
	}
	return items(g.nodes), nil
}

func (g *gathering) actions(ctx context.Context) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	answer, err := g.deps.Actions(ctx, g.req.Workspace.GetWorkspaceId())
	if err != nil {
		return nil, unanswered("lifecycle", err)
	}
	return cleaned{answer}, nil
}

func (g *gathering) policy(ctx context.Context) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	answer, err := g.deps.Policy(ctx)
	if err != nil {
		return nil, unanswered("recovery", err)
	}
	return cleaned{answer}, nil
}

// unanswered returns the gap for an owner that did not answer.
func unanswered(owner string, err error) error {
	return &absent{Gap{Why: owner + " did not answer: " + fault.From(err).Public, Next: "gpuaas status"}}
}

// part is one program of the mesh.
type part struct {
	Name     string    `json:"name"`
	Version  string    `json:"version"`
	Replica  string    `json:"replica_id,omitempty"`
	Draining string    `json:"draining,omitempty"`
	Parts    []cleaned `json:"parts,omitempty"`
}

func (g *gathering) versions(ctx context.Context) (any, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	own, revision := obs.Build()
	parts := []part{{Name: "readmodel", Version: own}}
	for _, p := range g.deps.Parts {
		said, err := p.Ask(ctx)
		if err != nil {
			g.bundle.lacks(Gap{
				What: "version and health of " + p.Name, Why: "it did not answer: " + fault.From(err).Public,
				Next: "gpuaas status",
			})
			continue
		}
		out := part{Name: p.Name, Version: said.GetVersion(), Replica: said.GetReplicaId(), Draining: said.GetDraining()}
		for _, c := range said.GetParts() {
			out.Parts = append(out.Parts, cleaned{c})
		}
		parts = append(parts, out)
	}
	g.bundle.lacks(Gap{
		What: "version of nodeapi", Why: "its replicas are not asked by readmodel",
		Next: "gpuaas version, on its hosts",
	})
	for _, n := range g.nodes {
		parts = append(parts, part{Name: "agent of " + n.GetName(), Version: n.GetSession().GetAgentVersion()})
	}
	schema, era := "", int64(0)
	err := g.read(ctx, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		if era, err = s.Era(ctx); err != nil {
			return err
		}
		schema, err = s.Schema(ctx)
		return err
	})
	return map[string]any{"items": parts, "revision": revision, "schema": schema, "era": era}, err
}

// ids returns the ids to search for in logs.
func (g *gathering) ids(context.Context) (any, error) {
	w := g.req.Workspace
	var runs, correlations, tasks []string
	add := func(list *[]string, id string) {
		if id != "" && !slices.Contains(*list, id) {
			*list = append(*list, id)
		}
	}
	for _, r := range g.runs {
		add(&runs, r.GetRunId())
		add(&correlations, r.GetCorrelationId())
	}
	for _, t := range g.tasks {
		add(&tasks, t.GetTaskId())
		add(&correlations, t.GetCorrelationId())
	}
	for _, a := range g.trail {
		add(&correlations, a.GetEntry().GetCorrelationId())
	}
	return map[string]any{
		"workspace_id": w.GetWorkspaceId(), "slug": w.GetTenant() + "/" + w.GetName(), "tenant": w.GetTenant(),
		"tenant_id": w.GetTenantId(), "epoch": w.GetEpoch(), "run_ids": runs, "correlation_ids": correlations,
		"task_ids": tasks, "node_ids": g.nodeIDs,
	}, nil
}

// try is one attempt of a person or of the mesh to repair the workspace.
type try struct {
	Verb    string    `json:"verb"`
	At      time.Time `json:"at"`
	By      string    `json:"by"`
	Outcome string    `json:"outcome"`
	Reason  string    `json:"reason,omitempty"`
	Count   int64     `json:"count,omitempty"`
}

// summary returns the facts that the person who receives an escalation needs first.
func (g *gathering) summary(context.Context) (any, error) {
	w := g.req.Workspace
	tried := map[string]bool{"cancel": false, "reset": false, "retry": false}
	tries := []try{}
	for _, row := range slices.Backward(g.trail) {
		e := row.GetEntry()
		verb, ok := strings.CutPrefix(e.GetAction(), "workspace.")
		if !ok || strings.Contains(verb, ".") || verb == "escalate" {
			continue
		}
		if _, asked := tried[verb]; asked {
			tried[verb] = true
		}
		tries = append(tries, try{
			Verb: verb, At: e.GetAt().AsTime(), By: e.GetActor(), Outcome: e.GetOutcome(),
			Reason: obs.Redact(e.GetReason()), Count: e.GetCount(),
		})
	}
	errs, lastGood := []map[string]any{}, map[string]any(nil)
	for _, i := range g.timeline {
		line := map[string]any{
			"step": i.GetName(), "run_id": i.GetRunId(), "round": i.GetRound(), "attempt": i.GetAttempt(),
			"direction": names.Of(i.GetDirection()),
		}
		switch {
		case i.GetError() != "":
			line["error"], line["error_code"], line["error_layer"] = obs.Redact(i.GetError()), i.GetErrorCode(),
				names.Of(i.GetErrorLayer())
			if i.GetCause() != "" {
				line["cause"] = obs.Redact(i.GetCause())
			}
			if i.GetLastOutput() != "" { // only where the person who collects may see it
				line["last_output"] = obs.Redact(i.GetLastOutput())
			}
			errs = append(errs, line)
		case i.GetState() == commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED &&
			i.GetDirection() == commonv1.Direction_DIRECTION_DO && i.GetRunId() == g.lastRun():
			line["finished_at"] = i.GetFinishedAt().AsTime()
			lastGood = line
		}
	}
	return map[string]any{
		"state": names.Of(w.GetState()), "state_at": w.GetStateAt().AsTime(), "user_state": names.Of(w.GetUserState()),
		"stalled": w.GetStalled(), "agent_connected": w.GetAgentConnected(), "reason": w.GetReason(),
		"agent_detail": w.GetAgentDetail(), "workload_reason": w.GetWorkloadReason(),
		"workload_detail": obs.Redact(w.GetWorkloadDetail()), "next_action": w.GetNextAction(),
		"why_waiting": obs.Redact(w.GetWhyWaiting()), "current_step": w.GetCurrentStep(),
		"last_error": obs.Redact(w.GetLastError()), "last_error_code": w.GetLastErrorCode(),
		"register_failures": w.GetRegisterFailures(), "last_good_step": lastGood, "errors": errs, "tried": tried,
		"tries": tries,
		"story": fmt.Sprintf("%d runs, %d tasks, %d nodes, %d audit entries", len(g.runs), len(g.tasks), len(g.nodes),
			len(g.trail)),
	}, nil
}

// lastRun returns the id of the workspace's run, or else of the newest run; empty if there was none.
func (g *gathering) lastRun() string {
	if id := g.req.Workspace.GetRunId(); id != "" || len(g.runs) == 0 {
		return id
	}
	return g.runs[0].GetRunId()
}
