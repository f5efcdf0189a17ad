package workspaces

import (
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// agent returns the text about a workspace's agent: why it cannot act, if that is known, else whether it is connected.
func agent(w *readmodelv1.Workspace) string {
	switch {
	case w.GetReason() != "":
		return w.GetReason()
	case w.GetAgentConnected():
		return "connected"
	case w.GetManagement().GetState() == readmodelv1.LayerState_LAYER_STATE_AWAY:
		return "away"
	case w.GetNodeId() != "" && w.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED:
		return "not connected"
	}
	return ""
}

// environment returns the names of each workload's variables, one line for each workload that has any. No answer of the
// API has their values.
func environment(workloads []*nodev1.Workload) string {
	var lines []string
	for _, w := range workloads {
		if len(w.GetEnvNames()) > 0 {
			lines = append(lines, w.GetName()+": "+strings.Join(w.GetEnvNames(), ", ")+" (values are secret)")
		}
	}
	return strings.Join(lines, "\n")
}

// View is how workspaces are printed.
var View = output.View[*readmodelv1.Workspace]{
	Name: kit.FullName,
	ID:   "workspace_id",
	Columns: []output.Column[*readmodelv1.Workspace]{
		{Title: "TENANT", Path: "tenant"},
		{Title: "NAME", Path: "name"},
		{Title: "STATE", Path: "state"},
		{Title: "USER STATE", Drop: 1, Path: "user_state"},
		{Title: "AGENT", Drop: 5, Of: func(_ *output.Printer, w *readmodelv1.Workspace) string { return agent(w) }},
		{Title: "EPOCH", Drop: 7, Path: "epoch"},
		{Title: "STEP", Drop: 4, Of: func(_ *output.Printer, w *readmodelv1.Workspace) string {
			return strings.TrimSpace(w.GetCurrentStep() + human.OnlyIf(w.GetStalled(), " (stalled)"))
		}},
		{Title: "NODE", Drop: 6, ID: true, Path: "node_name|node_id"},
		{Title: "SINCE", Drop: 8, Moves: true, Path: "state_at"},
		{Title: "LAST ERROR", Drop: 2, Text: true, Path: "last_error"},
		{Title: "WORKLOADS", Drop: 3, Text: true, Path: "workload_detail"},
		{Title: "AGENT SINCE", Moves: true, Path: "agent_since", Wide: true},
		{Title: "AGENT DETAIL", Path: "agent_detail", Wide: true},
		{Title: "ID", Path: "workspace_id", Wide: true},
		{Title: "GPUS", Path: "spec.gpus", Wide: true},
		{Title: "PLACEMENT", Path: "spec.placement", Wide: true},
		{Title: "CREATED BY", Path: "created_by", Wide: true},
	},
	More: []output.Column[*readmodelv1.Workspace]{
		{Title: "FOR ITS USER", Path: "user_text"},
		layerColumn("MANAGEMENT", (*readmodelv1.Workspace).GetManagement),
		layerColumn("RUNTIME", (*readmodelv1.Workspace).GetRuntime),
		layerColumn("EDGE", (*readmodelv1.Workspace).GetEdge),
		{Title: "VERDICT STALE SINCE", Path: "verdict_stale_since"},
		{Title: "NEXT ACTION", Path: "next_action"},
		{Title: "ENDPOINTS", Of: func(_ *output.Printer, w *readmodelv1.Workspace) string {
			return strings.Join(kit.TextsOf(w.GetEndpoints(), func(e *lifecyclev1.Endpoint) string {
				return strings.TrimSpace(e.GetUrl() + " " + strings.Trim(e.GetWorkload()+"/"+e.GetName(), "/"))
			}), "\n")
		}},
		{Title: "ENVIRONMENT", Of: func(_ *output.Printer, w *readmodelv1.Workspace) string {
			return environment(w.GetSpec().GetWorkloads())
		}},
		{Title: "FINDINGS", Of: func(_ *output.Printer, w *readmodelv1.Workspace) string {
			return records.FindingLines(w.GetFindings())
		}},
		{Title: "WAITING FOR", Path: "why_waiting"},
		{Title: "RUN", Path: "run_id"},
		{Title: "CREATED", Path: "created_at"},
	},
}
