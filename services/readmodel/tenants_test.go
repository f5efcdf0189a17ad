package readmodel_test

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
)

const (
	hiddenNode   = "rack7-secretmachine" // the name of a machine
	hiddenReason = "cloned_identity_detected"
	hiddenCode   = "node_disk_full"
	hiddenText   = "OPERATORTEXT"
	hiddenRef    = "PROVIDERREF"
	hiddenOwner  = "REPLICAOWNER"
	hiddenPath   = "/srv/secret-disk"
	hiddenDisk   = "; the node's state directory has no room: " + hiddenPath + ": 3 bytes are left"
	hiddenCordon = "; the node is cordoned by verdict:host_runtime_drift: the host is not as it was accepted: kernel is 2"
)

// marked puts into the projection of tenant x what no tenant may be shown, everywhere where services put it. It returns
// the markers.
func (k *kit) marked(x projecttest.Tenant) []string {
	k.t.Helper()
	at := timestamppb.New(k.Now().Add(-time.Minute))
	k.Append(&recoveryv1.NodeIdentity{
		NodeId: x.NodeID, Name: hiddenNode, State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, TenantId: x.ID,
		WorkspaceId: x.WorkspaceID, CreatedAt: at, StateAt: at, StateReason: hiddenReason + " " + hiddenText,
	})
	k.Append(&recoveryv1.NodeVerdict{
		NodeId: x.NodeID, Reason: commonv1.DriftReason_DRIFT_REASON_CLONED_IDENTITY_DETECTED, DetectedAt: at,
		UserState: commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED, NextAction: hiddenText, Owner: hiddenOwner,
	})
	k.Append(&nodev1.SessionChanged{
		SessionId: x.SessionID, NodeId: x.NodeID, ReplicaId: k.Replica, Generation: 1, ClosedAt: at, LastSeenAt: at,
		State: commonv1.SessionState_SESSION_STATE_CLOSED,
	})
	k.Append(&lifecyclev1.NodeGate{NodeId: x.NodeID, Name: hiddenNode, WorkspaceId: x.WorkspaceID})
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: x.WorkspaceID, TenantId: x.ID, Tenant: x.Name, Name: x.WorkspaceName, RunId: x.RunID, Epoch: 1,
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, CreatedAt: at, StateAt: at, NodeId: x.NodeID,
		NodeName: hiddenNode, LastError: hiddenNode + " has no room: " + hiddenText, LastErrorCode: hiddenCode,
		Spec:      &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}}},
		Endpoints: []*lifecyclev1.Endpoint{{Workload: "main", Name: "http", Url: "http://192.0.2.7:8080"}},
	})
	k.Observe(x.NodeID, &nodev1.Observation{
		WorkspaceId: x.WorkspaceID, Epoch: 1, ObservedAt: at,
		Workloads: []*nodev1.WorkloadStatus{{Name: "main", Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, Ready: true}},
	})
	k.Append(&lifecyclev1.Run{
		RunId: x.RunID, WorkspaceId: x.WorkspaceID, TenantId: x.ID, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Round: 1, State: commonv1.RunState_RUN_STATE_RUNNING, Phase: "do", Step: 1, Epoch: 1, Owner: hiddenOwner,
		WhyWaiting: "waiting for node " + x.NodeID + hiddenDisk, ErrorCode: hiddenCode, Error: hiddenText,
		CancelReason: hiddenText,
		ErrorLayer:   commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, StuckReason: hiddenText, CreatedAt: at,
		StepNames: []string{"Validate request", "Allocate storage", "Mark active"},
	})
	k.Append(&lifecyclev1.StepAttempt{
		RunId: x.RunID, WorkspaceId: x.WorkspaceID, Step: 1, Name: "Allocate storage", Attempt: 2,
		Direction: commonv1.Direction_DIRECTION_DO, State: commonv1.AttemptState_ATTEMPT_STATE_FAILED, StartedAt: at,
		FinishedAt: at, Error: hiddenText + " on " + hiddenNode, ErrorCode: hiddenCode, Cause: hiddenText,
		ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, Progress: "asked " + x.NodeID,
		WhyWaiting: "for " + x.NodeID + hiddenCordon,
	})
	k.Append(&lifecyclev1.Instance{
		InstanceId: x.InstanceID, WorkspaceId: x.WorkspaceID, WorkspaceName: x.WorkspaceName, TenantId: x.ID, Epoch: 1,
		NodeId: x.NodeID, State: commonv1.InstanceState_INSTANCE_STATE_LIVE, ProviderId: hiddenRef, StartedAt: at,
		EndReason: hiddenText,
	})
	k.Append(&lifecyclev1.Allocation{
		AllocationId: x.AllocationID, WorkspaceId: x.WorkspaceID, TenantId: x.ID, NodeId: x.NodeID, LastError: hiddenText,
		State: commonv1.AllocationState_ALLOCATION_STATE_ACTIVE, GpuDeviceIds: []string{hiddenRef},
	})
	k.Append(&lifecyclev1.Claim{
		ClaimId: x.ClaimID, WorkspaceId: x.WorkspaceID, TenantId: x.ID, RunId: x.RunID, Kind: "slot", Name: "slot",
		NodeId: x.NodeID, ExternalRef: hiddenRef, IntentAt: at, OrphanReason: hiddenText, OrphanedBy: hiddenOwner,
	})
	k.Append(&lifecyclev1.TaskChanged{
		Task: &lifecyclev1.Task{
			TaskId: x.TaskID, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: x.NodeID, WorkspaceId: x.WorkspaceID,
			TenantId: x.ID, State: commonv1.TaskState_TASK_STATE_FAILED, Attempt: 1, CreatedAt: at, ExpiresAt: at,
			Reason: commonv1.Reason_REASON_NODE_DISK_FULL, Error: hiddenText,
		},
		Transitions: []*lifecyclev1.TaskTransition{
			{State: commonv1.TaskState_TASK_STATE_FAILED, At: at, Detail: hiddenText},
		},
	})
	k.Append(&lifecyclev1.Finding{
		FindingId: ids.New(), Kind: commonv1.FindingKind_FINDING_KIND_ROW_CHANGED_OUTSIDE, SubjectType: "node",
		Severity: commonv1.Severity_SEVERITY_P1, SubjectId: x.NodeID, WorkspaceId: x.WorkspaceID, TenantId: x.ID,
		Summary: hiddenText, NextAction: hiddenText, FirstSeenAt: at, LastSeenAt: at, Count: 1,
	})
	record := &recoveryv1.RecoveryRecord{
		RecordId: ids.New(), WorkspaceId: x.WorkspaceID, TenantId: x.ID, Workspace: x.Name + "/" + x.WorkspaceName,
		DetectedAt: at, Trigger: commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED, Version: 1, ErrorCode: hiddenCode,
		Outcome: commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD, Cause: hiddenText,
		WithheldBecause: "17 of 40 workspaces: " + hiddenText, UserImpact: "none on " + x.NodeID,
	}
	k.announce("recovery_record.changed", "recovery_record", record.GetRecordId(), 1, record)
	k.audited(x,
		audit.Entry{
			Action: "workspace.recreate", Reason: "moved off " + x.NodeID, NodeID: x.NodeID,
			Details: map[string]any{"node_name": hiddenNode, "reason": hiddenReason, "note": hiddenText},
		},
		audit.Entry{Action: "workspace.retry", Actor: "olga", Reason: "moved off " + hiddenNode},
		audit.Entry{Action: "node.hold", Reason: hiddenReason + " " + hiddenText, NodeID: x.NodeID})
	k.awaitProjected()
	k.untilAudited("node.hold", 1)
	k.notified()
	return []string{
		x.NodeID, hiddenNode, hiddenReason, strings.ToUpper(hiddenReason), hiddenCode, strings.ToUpper(hiddenCode),
		hiddenText, hiddenRef, hiddenOwner, hiddenPath, "3 bytes are left", "host_runtime_drift", "HOST_RUNTIME_DRIFT",
		k.Replica, x.SessionID,
	}
}

// tenantCalls are the requests by which a person of a tenant reads what the methods of the people's port show of x. A
// method that has no entry fails the test: its author decides what tenants see of it. Nil stands for a request
// with the fields that fill sets.
func tenantCalls(x projecttest.Tenant) map[string][]proto.Message {
	generic := []proto.Message{nil}
	ws := x.WorkspaceID
	operate := func(kind commonv1.OperationKind) proto.Message {
		return &readmodelv1.OperateWorkspaceRequest{Workspace: ws, Kind: kind, Reason: "because"}
	}
	return map[string][]proto.Message{
		"QueryService/WhoAmI": generic, "QueryService/GetStatus": generic,
		"QueryService/ListNodes": {
			&readmodelv1.ListNodesRequest{}, &readmodelv1.ListNodesRequest{Name: hiddenNode},
			&readmodelv1.ListNodesRequest{NodeId: x.NodeID},
		},
		"QueryService/GetNode": {
			&readmodelv1.GetNodeRequest{Node: x.NodeID[:20]}, &readmodelv1.GetNodeRequest{Node: "rack7-secret"},
			&readmodelv1.GetNodeRequest{Node: x.NodeID},
		},
		"QueryService/ListNodeVerdicts": {&readmodelv1.ListNodeVerdictsRequest{Node: x.NodeID}},
		"QueryService/Resolve": {
			&readmodelv1.ResolveRequest{Ref: ws}, &readmodelv1.ResolveRequest{Ref: x.InstanceID},
			&readmodelv1.ResolveRequest{Ref: x.RunID}, &readmodelv1.ResolveRequest{Ref: x.TaskID},
			&readmodelv1.ResolveRequest{Ref: x.NodeID},
		},
		"QueryService/ListTenants":    generic,
		"QueryService/ListWorkspaces": {nil, &readmodelv1.ListWorkspacesRequest{Tenant: x.Name}},
		"QueryService/GetWorkspace":   {&readmodelv1.GetWorkspaceRequest{Workspace: ws}},
		"QueryService/GetTimeline": {
			&readmodelv1.GetTimelineRequest{Workspace: ws},
			&readmodelv1.GetTimelineRequest{Workspace: ws, RunId: x.RunID},
		},
		"QueryService/GetActions": {&readmodelv1.GetActionsRequest{Workspace: ws}},
		"QueryService/ReadOutput": {&readmodelv1.ReadOutputRequest{Workspace: ws}},
		"QueryService/ListTasks":  {nil, &readmodelv1.ListTasksRequest{Node: x.NodeID}},
		"QueryService/GetTask":    {&readmodelv1.GetTaskRequest{TaskId: x.TaskID}},
		"QueryService/ListInstances": {
			nil, &readmodelv1.ListInstancesRequest{WorkspaceId: ws},
		},
		"QueryService/ListClaims": generic, "QueryService/ListAllocations": generic,
		"QueryService/GetPolicy": generic,
		"QueryService/ExplainReason": {
			&readmodelv1.ExplainReasonRequest{}, &readmodelv1.ExplainReasonRequest{Code: hiddenCode},
			&readmodelv1.ExplainReasonRequest{Code: hiddenReason},
		},
		"QueryService/Watch": {
			&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{
				readmodelv1.Topic_TOPIC_WORKSPACES, readmodelv1.Topic_TOPIC_INSTANCES, readmodelv1.Topic_TOPIC_RUNS,
				readmodelv1.Topic_TOPIC_STEPS,
			}, Workspace: ws},
			&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_TASKS}, Workspace: ws},
			&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES}},
			&readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}, Node: x.NodeID},
		},
		"CommandService/CreateTenant": generic,
		"CommandService/CreateWorkspace": {
			&readmodelv1.CreateWorkspaceRequest{Tenant: x.Name, Name: "new"},
		},
		"CommandService/OperateWorkspace": {
			operate(commonv1.OperationKind_OPERATION_KIND_RECREATE), operate(commonv1.OperationKind_OPERATION_KIND_RETRY),
			operate(commonv1.OperationKind_OPERATION_KIND_CANCEL),
		},
		"CommandService/EnrollNode": generic, "CommandService/ChangeNodeIdentity": generic,
		"CommandService/SetCordon": generic, "CommandService/ProbeNode": generic, "CommandService/ChangeTask": generic,
		"CommandService/SetPolicy": generic, "ReleaseService/GetAllocation": {
			&readmodelv1.GetAllocationRequest{AllocationId: x.AllocationID},
		},
		"ReleaseService/RetryRelease": generic, "ReleaseService/ForceRelease": generic,
		"InstanceService/EndInstance": generic, "FindingService/ListFindings": generic,
		"FindingService/GetFinding": generic, "FindingService/AcknowledgeFinding": generic,
		"IncidentService/ListIncidents": generic, "IncidentService/GetIncident": generic,
		"IncidentService/ListRecoveries": {nil, &readmodelv1.ListRecoveriesRequest{Workspace: ws}},
		"IncidentService/GetBrake":       generic, "IncidentService/ReleaseBrake": generic,
		"IncidentService/CloseIncident": generic,
		"NotificationService/ListNotifications": {
			&readmodelv1.ListNotificationsRequest{}, &readmodelv1.ListNotificationsRequest{Workspace: ws},
			&readmodelv1.ListNotificationsRequest{IncidentId: x.RunID},
		},
		"AuditService/ListAudit": {
			nil, &readmodelv1.ListAuditRequest{Workspace: ws}, &readmodelv1.ListAuditRequest{Node: x.NodeID},
			&readmodelv1.ListAuditRequest{Action: "node."},
		},
		"AuditService/VerifyAudit":   generic,
		"EscalationService/Escalate": {&readmodelv1.EscalateRequest{Workspace: ws}},
		"EventService/ListEvents":    generic, "EventService/ListConsumers": generic,
		"EventService/ForgetConsumer": generic, "EventService/ListParked": generic, "EventService/ReplayParked": generic,
		"EventService/DropParked": generic, "KeyService/ListKeys": generic, "KeyService/RotateKey": generic,
		"PeopleService/CreatePerson": generic, "PeopleService/ListPeople": generic, "PeopleService/EndPerson": generic,
		"ProjectionService/GetProjections": generic, "ProjectionService/VerifyProjections": generic,
		"ProjectionService/RebuildProjections": generic,
		"RetentionService/GetRetention":        generic, "RollbackService/GetRollback": generic,
		"RollbackService/AcceptRollback": generic,
		"TokenService/ListTokens":        {nil, &readmodelv1.ListTokensRequest{NodeId: x.NodeID}},
		"TokenService/RevokeTokens":      {&readmodelv1.RevokeTokensRequest{NodeId: x.NodeID, Reason: "because"}},
		"TokenService/ExtendTokens": {&readmodelv1.ExtendTokensRequest{
			Profile: "default", Until: timestamppb.New(time.Now().Add(time.Hour)), Reason: "because",
		}},
		"ActionService/ListActions": {nil, &readmodelv1.ListActionsRequest{NodeId: x.NodeID}},
		"TrustService/GetTrust":     generic, "TrustService/RunPreflight": generic,
		"ProfileService/ListProfiles": generic,
		"ProfileService/SetProfile": {&readmodelv1.SetProfileRequest{
			Name: "site", ApiUrl: "a:1", RecoveryUrl: "https://a:2", CaBundlePem: []byte("pem"), Reason: "because",
		}},
		"ProfileService/ActivateProfile": {&readmodelv1.ActivateProfileRequest{
			Name: "site", Version: 1, Reason: "because",
		}},
		"ProfileService/RetireProfile":     {&readmodelv1.RetireProfileRequest{Name: "site", Version: 1, Reason: "because"}},
		"BundleService/IssueBundle":        {&readmodelv1.IssueBundleRequest{NodeId: x.NodeID, Reason: "because"}},
		"AuthorityService/RotateAuthority": {&readmodelv1.RotateAuthorityRequest{Reason: "because", IdempotencyKey: "one"}},
		"AuthorityService/RepairTrust": {&readmodelv1.RepairTrustRequest{
			RootFingerprint: strings.Repeat("ab", 32), Reason: "because",
		}},
		"HostFactsService/AcceptHostFacts": {&readmodelv1.AcceptHostFactsRequest{Node: x.NodeID, Reason: "because"}},
		"DiagnosticsService/MergeDiagnostics": {&readmodelv1.MergeDiagnosticsRequest{
			Node: x.NodeID, Records: []*recoveryv1.HostRecord{{Code: "dns_failed"}},
		}},
		"DiagnosticsService/CollectDiagnostics":      {&readmodelv1.CollectDiagnosticsRequest{Node: x.NodeID}},
		"DiagnosticsService/GetCollectedDiagnostics": {&readmodelv1.GetCollectedDiagnosticsRequest{TaskId: x.TaskID}},
	}
}

// watched returns what a watch sends until its snapshot is whole, and its error.
func (k *kit) watched(token string, req *readmodelv1.WatchRequest) string {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), testkit.Patience)
	defer cancel()
	stream, err := k.query(token).Watch(ctx, req)
	k.check(err)
	defer func() { cancel(); _ = stream.Close() }()
	var out strings.Builder
	for stream.Receive() {
		raw, err := protojson.Marshal(stream.Msg())
		k.check(err)
		out.Write(raw)
		if stream.Msg().GetBootstrapped() != nil {
			return out.String()
		}
	}
	f := fault.From(fault.FromConnect(stream.Err()))
	return out.String() + f.Error() + f.Remedy + strings.Join(f.Unmet, " ")
}

// textsOf returns the texts that a request has.
func textsOf(m proto.Message) []string {
	var out []string
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if f.Kind() == protoreflect.StringKind && !f.IsList() && !f.IsMap() {
			out = append(out, v.String())
		}
		return true
	})
	return out
}

// answers returns all that the holder of the token gets for the requests of x, by method.
func (k *kit) answers(token string, x projecttest.Tenant) map[string]string {
	k.t.Helper()
	client, calls, out := k.http(token, false), tenantCalls(x), map[string]string{}
	for _, p := range policies(k.t, k) {
		name := strings.TrimPrefix(p.Procedure, "/gpuaas.readmodel.v1.")
		requests, ok := calls[name]
		if !ok {
			k.t.Errorf("%s is not among the calls of a tenant: what do tenants see of it?", name)
		}
		for _, req := range requests {
			if req == nil {
				req = fill(p.Method().Input(), "", "")
			}
			switch req := req.(type) {
			case *readmodelv1.WatchRequest:
				out[name] += k.watched(token, req)
			case *readmodelv1.EscalateRequest:
				files, err := k.escalate(token, req.GetWorkspace())
				for file, raw := range files {
					out[name] += file + string(raw)
				}
				out[name] += cmp.Or(err, errors.New("")).Error()
			default:
				got := k.post(client, p.Procedure, req)
				if got.Status == http.StatusNotFound { // it repeats what the request itself named
					for _, asked := range textsOf(req) {
						got = got.without(asked)
					}
				}
				out[name] += got.Body + "\n"
			}
		}
		delete(calls, name)
	}
	for name := range calls {
		k.t.Errorf("there is no method %s", name)
	}
	return out
}

// refusedByOwners makes the owners return the markers as well, in answers and then in refusals.
func (k *kit) refusedByOwners(x projecttest.Tenant, refusal commonv1.Reason) {
	k.owners.refuse(nil)
	if refusal != 0 {
		k.owners.refuse(fault.New(refusal, "machine "+hiddenNode+" does not answer",
			fault.Unmet("bring back "+x.NodeID), fault.Remedy("as an operator, look at "+hiddenNode)))
	}
}

// Scenario: a node is held as a copy, its disk is full, and everything about it was recorded. Whatever method a person
// of the tenant calls, in whichever role, no answer, stream, error or bundle has a node, a reason of a node, a replica,
// a text for operators, or anything of another tenant.
func TestTenantsSeeNoMachines(t *testing.T) {
	k := newKit(t)
	markers := append(k.marked(k.A), canaries(k.B)...)
	markers = append(markers, k.Shared)
	found := map[string]bool{}
	for name, body := range k.answers(k.token("", "operator", "security", "viewer"), k.A) {
		if service, _, _ := strings.Cut(name, "/"); ofMachines[service] && !strings.Contains(body, hiddenNode) {
			t.Errorf("%s does not name the node to an operator: %s", name, body)
		}
		if name == "NotificationService/ListNotifications" && (!strings.Contains(body, hiddenReason) ||
			!strings.Contains(body, hiddenNode)) {
			t.Errorf("%s tells an operator neither reason nor node: %s", name, body)
		}
		for _, marker := range markers {
			found[marker] = found[marker] || strings.Contains(body, marker)
		}
	}
	for _, marker := range markers[:11] {
		if !found[marker] && marker != strings.ToUpper(hiddenCode) {
			t.Errorf("an operator is not shown %q either: the walk proves nothing of it", marker)
		}
	}
	for _, roles := range [][]string{{"tenant"}, {"viewer"}, {"tenant", "viewer", "operator", "security"}} {
		token := k.tokenOf("person@"+strings.Join(roles, "-"), k.A.ID, roles...)
		for _, refusal := range []commonv1.Reason{
			0, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, commonv1.Reason_REASON_NODE_NOT_CONNECTED,
		} {
			k.refusedByOwners(k.A, refusal)
			for name, body := range k.answers(token, k.A) {
				if name == "NotificationService/ListNotifications" && !strings.Contains(body, k.A.WorkspaceID) {
					t.Errorf("%s tells %v nothing: %s", name, roles, body)
				}
				for _, marker := range append(slices.Clone(markers), "node_not_connected", "NODE_NOT_CONNECTED") {
					if at := strings.Index(body, marker); at >= 0 {
						t.Errorf("%s tells %v %q: %s", name, roles, marker, body[max(0, at-200):min(len(body), at+100)])
					}
				}
			}
		}
	}
}

// Scenario: a node is under repair by people. A tenant's request to recreate or retry its workspace is told to wait,
// and when to ask again, dry runs included; operators are not.
func TestATenantWaitsWhileItsMachineIsRepaired(t *testing.T) {
	k := newKit(t)
	k.marked(k.A)
	tenant := k.token(k.A.ID, "tenant")
	for _, kind := range []commonv1.OperationKind{
		commonv1.OperationKind_OPERATION_KIND_RECREATE, commonv1.OperationKind_OPERATION_KIND_RETRY,
	} {
		for _, dry := range []bool{false, true} {
			req := &readmodelv1.OperateWorkspaceRequest{Workspace: k.A.WorkspaceID, Kind: kind, DryRun: dry, Reason: "because"}
			_, err := k.command(tenant).OperateWorkspace(testkit.Context(t), req)
			f := fault.From(fault.FromConnect(err))
			if f.Reason != commonv1.Reason_REASON_PRECONDITION_FAILED || len(f.Unmet) != 1 ||
				fault.ActionOf(f) != commonv1.Action_ACTION_WAIT || f.RetryAfter != 15*time.Minute {
				t.Errorf("%s: %+v", kind, f)
			}
			if _, err := k.command(k.token("", "operator")).OperateWorkspace(testkit.Context(t), req); err != nil {
				t.Errorf("an operator's %s: %v", kind, err)
			}
		}
	}
	if heard := k.owners.take(); slices.ContainsFunc(heard, func(a asked) bool { return a.person.TenantID != "" }) {
		t.Errorf("lifecycle was asked: %v", heard)
	}
	// A request that is neither of the two goes on to the owner.
	_, err := k.command(tenant).OperateWorkspace(testkit.Context(t), &readmodelv1.OperateWorkspaceRequest{
		Workspace: k.A.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_CANCEL, Reason: "because",
	})
	k.check(err)
	got, err := k.query(tenant).GetWorkspace(testkit.Context(t),
		&readmodelv1.GetWorkspaceRequest{Workspace: k.A.WorkspaceID})
	k.check(err)
	w := got.GetWorkspace()
	if w.GetUserState() != commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED || w.GetUserText() == "" ||
		w.GetManagement().GetState() != readmodelv1.LayerState_LAYER_STATE_AWAY || w.GetManagement().GetDetail() != "" ||
		w.GetRuntime().GetState() != readmodelv1.LayerState_LAYER_STATE_STALE || w.GetRuntime().GetSince() == nil ||
		w.GetEdge().GetState() != readmodelv1.LayerState_LAYER_STATE_UNKNOWN {
		t.Errorf("the tenant sees %v", w)
	}
	// The verdict is over: nothing is refused any more.
	k.Put(&recoveryv1.NodeVerdict{NodeId: k.A.NodeID, DetectedAt: timestamppb.New(k.Now())})
	k.awaitProjected()
	_, err = k.command(tenant).OperateWorkspace(testkit.Context(t), &readmodelv1.OperateWorkspaceRequest{
		Workspace: k.A.WorkspaceID, Kind: commonv1.OperationKind_OPERATION_KIND_RECREATE, Reason: "because",
	})
	k.check(err)
}

// The options that lifecycle offers are shown as they are, without what a repair forbids.
func TestActionsOfATenantDuringARepair(t *testing.T) {
	k := newKit(t)
	k.marked(k.A)
	for token, possible := range map[string]bool{k.token(k.A.ID, "tenant"): false, k.token("", "operator"): true} {
		got, err := k.query(token).GetActions(testkit.Context(t),
			&readmodelv1.GetActionsRequest{Workspace: k.A.WorkspaceID})
		k.check(err)
		for _, o := range got.GetActions() {
			if o.GetKind() == commonv1.OperationKind_OPERATION_KIND_RETRY { // which lifecycle refuses for the node
				if shown := o.GetReason() == commonv1.Reason_REASON_HOST_RUNTIME_DRIFT; o.GetPossible() || shown != possible ||
					len(o.GetUnmet()) != 1 {
					t.Errorf("%v, to operators: %v", o, possible)
				}
				continue
			}
			repaired := o.GetKind() == commonv1.OperationKind_OPERATION_KIND_RECREATE
			if o.GetPossible() != (possible || !repaired) || repaired && !possible && (len(o.GetUnmet()) == 0 ||
				o.GetReason() != commonv1.Reason_REASON_PRECONDITION_FAILED) {
				t.Errorf("%v, refused: %v", o, !possible)
			}
		}
	}
}
