package client_test

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

const (
	nodeID      = "0192f0c1-0000-7000-8000-000000000001"
	workspaceID = "0192f0c1-0000-7000-8000-000000000002"
	runID       = "0192f0c1-0000-7000-8000-000000000003"
	taskID      = "0192f0c1-0000-7000-8000-000000000004"
	instanceID  = "0192f0c1-0000-7000-8000-000000000005"
	claimID     = "0192f0c1-0000-7000-8000-000000000006"
	tenantID    = "0192f0c1-0000-7000-8000-000000000007"
	allocID     = "0192f0c1-0000-7000-8000-000000000008"
)

// bigEpoch is an epoch of the second era: beyond the integers that a 32-bit float can represent.
const bigEpoch = 2<<40 + 7

func node() *readmodelv1.Node {
	return &readmodelv1.Node{
		NodeId: nodeID, Name: "node-1", Connected: true, UserState: commonv1.UserState_USER_STATE_NORMAL,
		LastHeartbeatAt: at(5), ReplicaId: "replica-a", Since: at(1),
		Identity: &recoveryv1.NodeIdentity{
			NodeId: nodeID, Name: "node-1",
			State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, CurrentSerial: "a1", CertificateNotAfter: at(50),
		},
		Session: &nodev1.SessionChanged{
			SessionId: "s", State: commonv1.SessionState_SESSION_STATE_ADMITTED, Generation: bigEpoch,
			RemoteAddress: "10.0.0.7:1234", OpenedAt: at(2), AgentVersion: "v1",
			Host: &commonv1.HostFacts{
				Hostname: "rack1", Os: "linux", Kernel: "6.1", Cpus: 8, MemoryBytes: 32 << 30,
				Gpus: []*commonv1.Gpu{{DeviceId: "gpu-0", Simulated: true}},
			},
		},
		Gate: &lifecyclev1.NodeGate{
			NodeId: nodeID, Admitted: true, Slots: 4, SlotsUsed: 1, Gpus: 2, FenceEpoch: 1,
			SessionEpoch: bigEpoch,
		},
	}
}

func workspace(state commonv1.WorkspaceState) *readmodelv1.Workspace {
	spec := &lifecyclev1.WorkspaceSpec{
		Gpus: 1, Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
		Workloads: []*nodev1.Workload{{Name: "demo", Command: []string{"@demo"}, EnvNames: []string{"API_KEY", "HOST"}}},
	}
	return &readmodelv1.Workspace{
		WorkspaceId: workspaceID, Name: "demo2", Tenant: "acme", TenantId: tenantID, State: state,
		UserState: commonv1.UserState_USER_STATE_NORMAL, Epoch: bigEpoch, RunId: runID, NodeName: "box-demo2", Spec: spec,
		StateAt: at(9), CreatedAt: at(1),
		Endpoints: []*lifecyclev1.Endpoint{{Workload: "demo", Name: "http", Url: "http://127.0.0.1:4000"}},
		CreatedBy: "op@example.test", NodeId: nodeID, AgentConnected: true, AgentSince: at(8),
		Management: &readmodelv1.Layer{
			State: readmodelv1.LayerState_LAYER_STATE_AWAY, Since: at(8), UserText: "It cannot be managed at present.",
			Detail:  "disconnected: the agent cannot be reached",
			Waiting: []commonv1.OperationKind{commonv1.OperationKind_OPERATION_KIND_RECREATE},
		},
		Runtime: &readmodelv1.Layer{
			State: readmodelv1.LayerState_LAYER_STATE_STALE, Since: at(8), UserText: "Nothing new has been reported.",
		},
		Edge:     &readmodelv1.Layer{State: readmodelv1.LayerState_LAYER_STATE_UNKNOWN, UserText: "It is not checked."},
		UserText: "There is nothing to do.",
	}
}

func task(state commonv1.TaskState, states ...commonv1.TaskState) *readmodelv1.Task {
	t := &readmodelv1.Task{
		TaskId: taskID, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: nodeID, NodeName: "node-1", State: state,
		Attempt: 1, CreatedAt: at(0), CorrelationId: "c-1",
	}
	for i, s := range states {
		tr := &lifecyclev1.TaskTransition{State: s, At: at(i), Attempt: 1}
		if i > 0 {
			tr.SessionEpoch = 3
		}
		t.Transitions = append(t.Transitions, tr)
	}
	return t
}

func finding() *lifecyclev1.Finding {
	before, _ := structpb.NewStruct(map[string]any{"version": 7, "state": "active"})
	after, _ := structpb.NewStruct(map[string]any{"version": 7, "state": "failed", "changes": []any{map[string]any{
		"at": "2026-01-02T03:04:01Z", "how": "update", "by": "gpuaas_owner", "application": "psql", "client": "local",
		"backend": 4711, "transaction": "8123",
	}}})
	return &lifecyclev1.Finding{
		FindingId: claimID, Kind: commonv1.FindingKind_FINDING_KIND_ROW_CHANGED_OUTSIDE,
		Severity: commonv1.Severity_SEVERITY_P1, SubjectType: "workspace", SubjectId: workspaceID, WorkspaceId: workspaceID,
		TenantId: tenantID, Summary: "the row was changed outside its saga: state", NextAction: "set the row back",
		Before: before, After: after, FirstSeenAt: at(2), LastSeenAt: at(9), Count: 4, Version: 3,
	}
}

func operation() *lifecyclev1.Operation {
	return &lifecyclev1.Operation{
		OperationId: runID, WorkspaceId: workspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Epoch: bigEpoch,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, Pos: "2:77",
	}
}

// stock fills a fake with one of everything.
func stock(f *fake) {
	always(f, "ListNodes", &readmodelv1.ListNodesResponse{Items: []*readmodelv1.Node{
		node(),
		{
			NodeId: taskID, Name: "evil\x1b[31m\tname", UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
			Reason: "never_enrolled",
		},
	}})
	always(f, "GetNode", &readmodelv1.GetNodeResponse{Node: node()})
	always(f, "ListNodeVerdicts", &readmodelv1.ListNodeVerdictsResponse{Items: verdicts()})
	away := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	away.UserState, away.AgentConnected, away.Reason = commonv1.UserState_USER_STATE_TEMPORARY, false, "agent_down"
	away.AgentDetail = "the agent cannot be reached since 2026-01-02T03:04:13Z; the workload may well run"
	always(
		f, "ListWorkspaces", &readmodelv1.ListWorkspacesResponse{
			Items: []*readmodelv1.Workspace{workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE), away},
		},
	)
	drifted := workspace(commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	drifted.Findings = []*lifecyclev1.Finding{finding()}
	always(f, "GetWorkspace", &readmodelv1.GetWorkspaceResponse{Workspace: drifted})
	always(f, "GetTimeline", &readmodelv1.GetTimelineResponse{
		Workspace: workspace(commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING), Runs: []*lifecyclev1.Run{{RunId: runID}},
		History: []*readmodelv1.RunBrief{
			{
				RunId: runID, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, State: commonv1.RunState_RUN_STATE_RUNNING,
				StartedAt: at(9), Shown: true,
			},
			{
				RunId: taskID, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, State: commonv1.RunState_RUN_STATE_FAILED,
				StartedAt: at(1), EndedAt: at(7), FailedStep: "launch_box", Error: "the box did not start",
				ErrorCode:  "launch_failed",
				ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
			},
		},
		Items: []*readmodelv1.TimelineItem{
			{
				Step: "1", Name: "reserve_slot", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
				State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, StartedAt: at(1),
				DurationSeconds: 0.25,
			},
			{
				Step: "2", Name: "launch_box", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 2,
				State: commonv1.AttemptState_ATTEMPT_STATE_FAILED, StartedAt: at(2), DurationSeconds: 75, Stalled: true,
				Error: "the box did not start", ErrorCode: "launch_failed", ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
				LikelyCause: "no memory", Advice: "add memory",
				LastOutput: "first line\nKilled \x1b[1mby\x1b[0m the kernel",
			},
			{
				Step: "2", Name: "launch_box", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 3,
				State: commonv1.AttemptState_ATTEMPT_STATE_RUNNING, StartedAt: at(4), DurationSeconds: 190,
				HeartbeatAgeSeconds: 12.5, Progress: "7 of 9 layers", WhyWaiting: "the image is fetched", Stage: "launch",
			},
			{Step: "3", Name: "make_storage", Direction: commonv1.Direction_DIRECTION_DO},
		},
	})
	always(f, "GetActions", &readmodelv1.GetActionsResponse{Actions: []*lifecyclev1.ActionOption{
		{Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Possible: true, Consequence: "ends it"},
		{
			Kind: commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO, Unmet: []string{"the run is stuck"},
			Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
		},
	}})
	always(
		f, "ListTasks", &readmodelv1.ListTasksResponse{
			Items: []*readmodelv1.Task{task(commonv1.TaskState_TASK_STATE_RUNNING)},
		},
	)
	always(f, "GetTask", &readmodelv1.GetTaskResponse{Task: task(commonv1.TaskState_TASK_STATE_SUCCEEDED,
		commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DISPATCHED,
		commonv1.TaskState_TASK_STATE_SUCCEEDED)})
	always(f, "ListInstances", &readmodelv1.ListInstancesResponse{Items: []*lifecyclev1.Instance{{
		InstanceId: instanceID, WorkspaceId: workspaceID, WorkspaceName: "demo2", Epoch: bigEpoch,
		State: commonv1.InstanceState_INSTANCE_STATE_LIVE, ProviderId: "process:1", StartedAt: at(3),
		Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS,
	}}})
	always(f, "ListClaims", &readmodelv1.ListClaimsResponse{Items: []*lifecyclev1.Claim{
		{
			ClaimId: claimID, WorkspaceId: workspaceID, Kind: "storage", Name: "ws-1",
			Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL, IntentAt: at(1), ConfirmedAt: at(2),
		},
		{
			ClaimId: instanceID, WorkspaceId: workspaceID, Kind: "slot", Name: "slot-1",
			Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED, OrphanedAt: at(2), OrphanedBy: "op", OrphanReason: "gone",
		},
	}})
	allocated := &lifecyclev1.Allocation{
		AllocationId: allocID, WorkspaceId: workspaceID, Epoch: 1,
		State: commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, Occupancy: "cleanup",
		GpuDeviceIds: []string{"gpu-0", "gpu-1"}, Fence: 4, StateAt: at(3), LastError: "the machine did not answer",
	}
	always(f, "ListAllocations", &readmodelv1.ListAllocationsResponse{Items: []*lifecyclev1.Allocation{allocated}})
	always(f, "GetAllocation", &readmodelv1.GetAllocationResponse{Allocation: allocated, Claims: []*lifecyclev1.Claim{
		{
			ClaimId: claimID, WorkspaceId: workspaceID, Kind: "storage", Name: "ws-1",
			Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL, IntentAt: at(1), ConfirmedAt: at(2),
		},
	}})
	always(f, "ListTenants", &readmodelv1.ListTenantsResponse{Items: []*lifecyclev1.Tenant{{
		TenantId: tenantID, Name: "acme", Quota: &lifecyclev1.Quota{Workspaces: 10, Gpus: 8, StorageBytes: 1 << 40},
		CreatedAt: at(1),
	}}})
	always(f, "GetPolicy", &readmodelv1.GetPolicyResponse{Items: []*recoveryv1.PolicyKey{
		{
			Key: "heartbeat.interval", Value: "10s", DefaultValue: "5s", Minimum: "1s", Maximum: "60s", Overridden: true,
			UpdatedBy: "op", UpdatedAt: at(1), Reason: "slow", Meaning: "how often",
		},
	}})
	always(f, "GetStatus", &readmodelv1.GetStatusResponse{
		Components: []*readmodelv1.ComponentStatus{
			{Name: "database", Ok: true, ObservedAt: at(1)},
			{Name: "lifecycle", Detail: "cannot be reached", ObservedAt: at(1)},
			{
				Name: "lock_store", State: commonv1.PartState_PART_STATE_DOWN, Detail: "Redis does not answer", ObservedAt: at(2),
				Since: at(1), Reason: "unavailable",
				NextAction: "start it again",
			},
			{
				Name: "ca", Ok: true, State: commonv1.PartState_PART_STATE_OK, Detail: "as recovery finds it", ObservedAt: at(2),
				Since: at(1),
			},
		},
		FindingsP0: 1, FindingsP1: 2, Nodes: 3, NodesConnected: 2, Workspaces: 1, WorkspacesActive: 1, Position: 99, Era: 2,
		Version: "v1",
		History: &readmodelv1.HistoryStatus{
			EventsBytes: 3 << 20, DatabaseBytes: 40 << 20, LimitBytes: 100 << 20, BytesPerDay: 6 << 20, RetentionLagSeconds: 90,
		},
	})
	always(f, "GetFinding", &readmodelv1.GetFindingResponse{Finding: finding()})
	done := finding()
	done.ResolvedAt, done.AcknowledgedBy, done.AcknowledgeReason = at(10), "ana@example.org", "it was the runbook"
	always(f, "AcknowledgeFinding",
		&readmodelv1.AcknowledgeFindingResponse{Response: &lifecyclev1.AcknowledgeFindingResponse{
			Finding: done,
			Pos:     "1:9",
		}})
	always(f, "ListFindings", &readmodelv1.ListFindingsResponse{Items: []*lifecyclev1.Finding{finding()}})
	ana := &readmodelv1.Person{
		PersonId: claimID, Name: "ana", Roles: []string{"tenant", "viewer"}, TenantId: tenantID, Tenant: "acme",
		CreatedAt: at(1), CreatedBy: "dev", State: readmodelv1.PersonState_PERSON_STATE_LIVE, ExpiresAt: at(9),
	}
	bob := &readmodelv1.Person{
		PersonId: allocID, Name: "bob", Roles: []string{"security"}, CreatedAt: at(1),
		State: readmodelv1.PersonState_PERSON_STATE_ENDED, ExpiresAt: at(9), EndedAt: at(4), EndedBy: "ana",
	}
	always(f, "ListPeople", &readmodelv1.ListPeopleResponse{Items: []*readmodelv1.Person{ana, bob}})
	always(f, "EndPerson", &readmodelv1.EndPersonResponse{Person: bob})
	answer(f, "Resolve", resolveStock)
	always(f, "CreateTenant", &readmodelv1.CreateTenantResponse{Tenant: &lifecyclev1.Tenant{
		TenantId: tenantID,
		Name:     "acme",
	}, Existed: true, Pos: "1:1"})
	always(f, "CreateWorkspace", &readmodelv1.CreateWorkspaceResponse{Operation: operation()})
	always(f, "OperateWorkspace", &readmodelv1.OperateWorkspaceResponse{Operation: operation()})
	always(f, "SetPolicy", &readmodelv1.SetPolicyResponse{Key: &recoveryv1.PolicyKey{
		Key:   "heartbeat.interval",
		Value: "9s",
	}, Pos: "1:2"})
}

// TestGolden checks the output of each kind of object in each form, because scripts and people rely on it.
func TestGolden(t *testing.T) {
	f := mesh(t)
	stock(f)
	commands := map[string][]string{
		"nodes":       {"nodes", "list"},
		"node":        {"nodes", "get", "node-1"},
		"verdicts":    {"nodes", "verdicts", "node-1"},
		"workspaces":  {"workspaces", "list"},
		"workspace":   {"workspaces", "get", "acme/demo2"},
		"timeline":    {"workspaces", "timeline", "demo2"},
		"actions":     {"workspaces", "actions", "demo2"},
		"tasks":       {"tasks", "list"},
		"task":        {"tasks", "get", taskID},
		"instances":   {"instances", "list"},
		"claims":      {"claims", "list"},
		"allocations": {"allocations", "list"},
		"allocation":  {"allocations", "get", allocID},
		"findings":    {"findings", "list"},
		"finding":     {"findings", "get", claimID},
		"finding_ack": {"findings", "acknowledge", claimID, "--reason", "it was the runbook"},
		"tenants":     {"tenants", "list"},
		"tenant":      {"tenants", "get", "acme"},
		"tenant_new":  {"tenants", "create", "acme"},
		"people":      {"people", "list"},
		"person_end":  {"people", "end", "ana", "--yes"},
		"policies":    {"policy", "get"},
		"policy":      {"policy", "get", "heartbeat.interval"},
		"policy_set":  {"policy", "set", "heartbeat.interval", "9s"},
		"status":      {"status"},
		"operation":   {"workspaces", "create", "demo2", "--tenant", "acme"},
		"reason":      {"explain", "reason", "no_capacity"},
	}
	for _, name := range slices.Sorted(maps.Keys(commands)) {
		t.Run(name, func(t *testing.T) {
			var whole strings.Builder
			forms := map[string]string{}
			for _, form := range []string{"table", "wide", "name", "json", "jsonl", "yaml"} {
				got := call(t, append(slices.Clone(commands[name]), "-o", form)...).wants(t, 0)
				if got.err != "" {
					t.Errorf("-o %s wrote to stderr: %q", form, got.err)
				}
				if strings.ContainsRune(got.out, '\x1b') {
					t.Errorf("-o %s wrote an escape sequence: %q", form, got.out)
				}
				forms[form] = got.out
				if form == "table" || form == "wide" || form == "name" {
					whole.WriteString("-- " + form + " --\n" + got.out)
				}
			}
			sameData(t, forms["json"], forms["jsonl"], forms["yaml"])
			goldenJSON(t, name+".json", forms["json"])
			golden(t, name+".golden", whole.String())
		})
	}
}

// sameData checks that the three forms for programs have the same data.
func sameData(t *testing.T, asJSON, asLines, asYAML string) {
	t.Helper()
	var want, fromYAML any
	decode(t, asJSON, &want)
	raw, err := yaml.YAMLToJSON([]byte(asYAML))
	if err != nil {
		t.Fatalf("%v in %s", err, asYAML)
	}
	decode(t, string(raw), &fromYAML)
	if diff := cmp.Diff(want, fromYAML); diff != "" {
		t.Errorf("YAML differs from JSON (-json +yaml):\n%s", diff)
	}
	items := []any{want}
	if object, ok := want.(map[string]any); ok && object["items"] != nil {
		items, _ = object["items"].([]any)
	}
	lines := strings.Split(strings.TrimSuffix(asLines, "\n"), "\n")
	if len(lines) != len(items) {
		t.Fatalf("%d lines for %d items", len(lines), len(items))
	}
	for i, line := range lines {
		var got any
		decode(t, line, &got)
		if diff := cmp.Diff(items[i], got); diff != "" {
			t.Errorf("line %d differs from JSON (-json +line):\n%s", i, diff)
		}
	}
}

// TestFields: the fields that scripts use are at the top level, with the documented names and types.
func TestFields(t *testing.T) {
	f := mesh(t)
	stock(f)
	tests := []struct {
		name   string
		args   []string
		list   bool
		fields map[string]any
	}{
		{"node", []string{"nodes", "list"}, true, map[string]any{
			"node_id": nodeID, "name": "node-1", "connected": true, "user_state": "normal", "reason": "",
			"last_heartbeat_at": "2026-01-02T03:04:05.5Z",
		}},
		{"workspace", []string{"workspaces", "get", "demo2"}, false, map[string]any{
			"workspace_id": workspaceID, "name": "demo2", "tenant": "acme", "state": "active", "user_state": "normal",
			"epoch": json.Number("2199023255559"), "last_error": "", "agent_connected": true,
			"agent_since": "2026-01-02T03:04:08.5Z", "reason": "", "agent_detail": "",
		}},
		{"timeline", []string{"workspaces", "timeline", "demo2"}, true, map[string]any{
			"step": "1", "name": "reserve_slot", "direction": "do", "attempt": json.Number("1"), "state": "succeeded",
			"duration_seconds": json.Number("0.25"), "stalled": false, "error": "",
			"started_at": "2026-01-02T03:04:01.5Z",
		}},
		{"instance", []string{"instances", "list"}, true, map[string]any{
			"instance_id": instanceID, "workspace_id": workspaceID, "workspace_name": "demo2",
			"epoch": json.Number("2199023255559"), "provider_id": "process:1", "ended_at": nil,
		}},
		{"task", []string{"tasks", "get", taskID}, false, map[string]any{
			"task_id": taskID, "type": "probe.noop", "node_id": nodeID, "state": "succeeded", "attempt": json.Number("1"),
		}},
		{"operation", []string{"workspaces", "create", "demo2", "--tenant", "acme"}, false, map[string]any{
			"operation_id": runID, "kind": "create", "joined": false, "epoch": json.Number("2199023255559"),
			"state": "provisioning", "pos": "2:77",
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := call(t, append(tt.args, "-o", "json")...).wants(t, 0)
			var object map[string]any
			decode(t, got.out, &object)
			if tt.list {
				if object["next_page_token"] != "" {
					t.Errorf("next_page_token is %v", object["next_page_token"])
				}
				object, _ = object["items"].([]any)[0].(map[string]any)
			}
			for field, want := range tt.fields {
				if have, ok := object[field]; !ok || have != want {
					t.Errorf("%s is %#v, want %#v", field, have, want)
				}
			}
		})
	}
	var whole struct {
		Transitions []struct {
			State        string
			At           string
			SessionEpoch int64 `json:"session_epoch"`
		}
	}
	decode(t, call(t, "tasks", "get", taskID, "-o", "json").out, &whole)
	if len(whole.Transitions) != 3 || whole.Transitions[1].State != "dispatched" ||
		whole.Transitions[1].SessionEpoch != 3 || whole.Transitions[1].At == "" {
		t.Errorf("transitions: %+v", whole.Transitions)
	}
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(into); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
}

func TestJQ(t *testing.T) {
	f := mesh(t)
	stock(f)
	if got := call(t, "nodes", "list", "--jq", ".items[].node_id").wants(t, 0); got.out != nodeID+"\n"+taskID+"\n" {
		t.Errorf("answered %q", got.out)
	}
	if got := call(t, "nodes", "list", "-o", "jsonl", "--jq", ".connected").wants(t, 0); got.out != "true\nfalse\n" {
		t.Errorf("answered %q", got.out)
	}
	call(t, "nodes", "list", "--jq", ".items[").wants(t, 2)
	call(t, "nodes", "list", "-o", "yaml", "--jq", ".").wants(t, 2)
}

// TestPages: a list is complete whatever the size of the server's pages, and ends at --limit.
func TestPages(t *testing.T) {
	f := mesh(t)
	answer(f, "ListNodes", func(req *readmodelv1.ListNodesRequest) (*readmodelv1.ListNodesResponse, error) {
		next := map[string]string{"": "2", "2": "3", "3": ""}
		return &readmodelv1.ListNodesResponse{Items: []*readmodelv1.Node{{
			Name:            "n" + req.GetPageToken(),
			LastHeartbeatAt: timestamppb.Now(),
		}}, NextPageToken: next[req.GetPageToken()]}, nil
	})
	if got := call(t, "nodes", "list", "-o", "name").wants(t, 0); got.out != "n\nn2\nn3\n" {
		t.Errorf("answered %q", got.out)
	}
	got := call(t, "nodes", "list", "-o", "json", "--limit", "2", "--jq",
		"[.next_page_token, (.items | length)] | @csv").wants(t, 0)
	if got.out != "\"3\",2\n" {
		t.Errorf("answered %q", got.out)
	}
	if got := call(t, "nodes", "list", "-o", "name", "--page-token", "3").wants(t, 0); got.out != "n3\n" {
		t.Errorf("answered %q", got.out)
	}
	always(f, "ListNodes", &readmodelv1.ListNodesResponse{NextPageToken: "same"})
	call(t, "nodes", "list").wants(t, 1)
}

// TestEmptyListsInAPipe: a list without items has its header in a pipe, so that a program that reads it finds the
// fields. This holds for every list.
func TestEmptyListsInAPipe(t *testing.T) {
	f := mesh(t)
	always(f, "ListNodes", &readmodelv1.ListNodesResponse{})
	always(f, "ListWorkspaces", &readmodelv1.ListWorkspacesResponse{})
	always(f, "ListTasks", &readmodelv1.ListTasksResponse{})
	always(f, "ListPeople", &readmodelv1.ListPeopleResponse{})
	always(f, "ListAudit", &readmodelv1.ListAuditResponse{})
	for _, line := range []string{"nodes list", "workspaces list", "tasks list", "people list", "audit list"} {
		got := call(t, strings.Fields(line)...).wants(t, 0)
		if strings.Count(got.out, "\n") != 1 || strings.ToUpper(got.out) != got.out || !strings.Contains(got.out, "\t") ||
			got.err != "" {
			t.Errorf("%s: %q %q", line, got.out, got.err)
		}
	}
}

// TestBadPathsAndPorts: a path or a port that cannot be used is a mistake in the command line: exit code 2, before a
// request is sent.
func TestBadPathsAndPorts(t *testing.T) {
	f := mesh(t)
	stock(f)
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "", 0o600)
	for _, line := range []string{
		"workspaces escalate demo2 --out " + file + "/x.zip", "nodes enroll --name n --out " + file + "/dir",
		"people create ana --role viewer --out " + file + "/dir", "nodes list --server 127.0.0.1:99999",
		"nodes list --server 127.0.0.1:0",
	} {
		got := call(t, strings.Fields(line)...).wants(t, 2)
		if strings.Contains(got.err, "internal") || !strings.HasPrefix(got.err, "error: invalid_argument: ") ||
			len(f.requests) > 0 {
			t.Errorf("%s: %s", line, got.err)
		}
	}
}
