package client_test

import (
	"encoding/json"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

func notifications() []*readmodelv1.Notification {
	return []*readmodelv1.Notification{{
		ImpactId: taskID, WorkspaceId: workspaceID, Workspace: "acme/demo2", TenantId: tenantID, AllocationId: allocID,
		Layer:     readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME,
		UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
		Event:     readmodelv1.ImpactEvent_IMPACT_EVENT_BEGAN, Text: "node_disk_full: no room", BeganAt: at(1), Count: 2,
		CreatedAt: at(1), Channel: "api", Version: 3, NodeId: nodeID, NodeName: "node-1", OperatorReason: "node_disk_full",
		IncidentId: claimID, Evidence: []string{"node_disk_full: 3 bytes are left"}, CorrelationId: "c-1",
	}, {
		ImpactId: runID, WorkspaceId: workspaceID, Workspace: "acme/demo2", TenantId: tenantID,
		Layer: readmodelv1.ImpactLayer_IMPACT_LAYER_RUNTIME, UserState: commonv1.UserState_USER_STATE_TEMPORARY,
		Event: readmodelv1.ImpactEvent_IMPACT_EVENT_ENDED, Text: "What disturbed it is over.", BeganAt: at(1), EndedAt: at(9),
		Count: 1, CreatedAt: at(9), FirstShownAt: at(10), Channel: "api", Version: 2,
	}}
}

func TestNotifications(t *testing.T) {
	f := mesh(t)
	always(f, "ListNotifications", &readmodelv1.ListNotificationsResponse{Items: notifications()})
	for line, want := range map[string][]string{
		"notifications list": {
			"acme/demo2", "operator_action_required", "began", "ended", "What disturbed it is over.",
		},
		"notifications list -o wide": {
			"node-1", "node_disk_full", "3 bytes are left", claimID, allocID, taskID,
		},
		"notifications list -o name":                           {taskID, runID},
		"notifications list -o json --jq .items[0].user_state": {"operator_action_required"},
	} {
		got := call(t, strings.Split(line, " ")...).wants(t, 0)
		for _, text := range want {
			if !strings.Contains(got.out, text) {
				t.Errorf("%s: %q is missing in\n%s", line, text, got.out)
			}
		}
	}
	var listed struct {
		Items []map[string]any `json:"items"`
		Next  string           `json:"next_page_token"`
	}
	got := call(t, "notifications", "list", "-o", "json").wants(t, 0)
	if err := json.Unmarshal([]byte(got.out), &listed); err != nil || len(listed.Items) != 2 ||
		listed.Items[0]["layer"] != "runtime" || listed.Items[0]["count"] != float64(2) ||
		listed.Items[1]["event"] != "ended" || listed.Items[0]["ended_at"] != nil {
		t.Errorf("%s %v", got.out, err)
	}
	call(t, "notifications", "list", "--open", "--workspace", "acme/demo2", "--incident", claimID).wants(t, 0)
	requests := sent[*readmodelv1.ListNotificationsRequest](f)
	if last := requests[len(requests)-1]; !last.GetOpenOnly() || last.GetWorkspace() != "acme/demo2" ||
		last.GetIncidentId() != claimID {
		t.Errorf("%v", last)
	}
	refuse(f, "ListNotifications", fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "not for you"))
	call(t, "notifications", "list", "--incident", claimID).wants(t, 4)
}
