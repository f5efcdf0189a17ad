package client

import (
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
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

var workspaceView = view[*readmodelv1.Workspace]{
	name: fullName,
	id:   "workspace_id",
	columns: []column[*readmodelv1.Workspace]{
		{title: "TENANT", path: "tenant"},
		{title: "NAME", path: "name"},
		{title: "STATE", path: "state"},
		{title: "USER STATE", drop: 1, path: "user_state"},
		{title: "AGENT", drop: 5, of: func(_ *printer, w *readmodelv1.Workspace) string { return agent(w) }},
		{title: "EPOCH", drop: 7, path: "epoch"},
		{title: "STEP", drop: 4, of: func(_ *printer, w *readmodelv1.Workspace) string {
			return strings.TrimSpace(w.GetCurrentStep() + onlyIf(w.GetStalled(), " (stalled)"))
		}},
		{title: "NODE", drop: 6, id: true, path: "node_name|node_id"},
		{title: "SINCE", drop: 8, moves: true, path: "state_at"},
		{title: "LAST ERROR", drop: 2, text: true, path: "last_error"},
		{title: "WORKLOADS", drop: 3, text: true, path: "workload_detail"},
		{title: "AGENT SINCE", moves: true, path: "agent_since", wide: true},
		{title: "AGENT DETAIL", path: "agent_detail", wide: true},
		{title: "ID", path: "workspace_id", wide: true},
		{title: "GPUS", path: "spec.gpus", wide: true},
		{title: "PLACEMENT", path: "spec.placement", wide: true},
		{title: "CREATED BY", path: "created_by", wide: true},
	},
	more: []column[*readmodelv1.Workspace]{
		{title: "NEXT ACTION", path: "next_action"},
		{title: "ENDPOINTS", of: func(_ *printer, w *readmodelv1.Workspace) string {
			lines := make([]string, 0, len(w.GetEndpoints()))
			for _, e := range w.GetEndpoints() {
				lines = append(lines, strings.TrimSpace(e.GetUrl()+" "+strings.Trim(e.GetWorkload()+"/"+e.GetName(), "/")))
			}
			return strings.Join(lines, "\n")
		}},
		{title: "ENVIRONMENT", of: func(_ *printer, w *readmodelv1.Workspace) string { return environment(w.GetSpec().GetWorkloads()) }},
		{title: "FINDINGS", of: func(_ *printer, w *readmodelv1.Workspace) string { return findingLines(w.GetFindings()) }},
		{title: "WAITING FOR", path: "why_waiting"},
		{title: "RUN", path: "run_id"},
		{title: "CREATED", path: "created_at"},
	},
}
