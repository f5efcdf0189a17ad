package output_test

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/controlplane"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/inventory"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/nodes"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/workspaces"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

const (
	uuidOne   = "01a202da-fe6f-713c-ac64-0f4e1b6a9d31"
	uuidTwo   = "01a202da-fe70-7c11-9a02-77c1d2e3f405"
	uuidThree = "01a202e6-0b1c-7a55-8d3e-1b6a9d310c64"
	longError = "launch_box: the box did not start: exec: \"/opt/trainer/bin/serve\": stat /opt/trainer/bin/serve: no " +
		"such file or directory"
)

// shown is one list with values as long as they are in use.
type shown struct {
	name string
	keys []string // values that no width may cut, whole or as a short id
	show func(*output.Printer) error
}

func listed[T proto.Message](name string, v output.View[T], keys []string, items ...T) shown {
	return shown{name, keys, func(pr *output.Printer) error { return output.List(pr, v, items, "") }}
}

// longLists returns all lists with realistic long values.
func longLists() []shown {
	return []shown{
		listed("nodes", nodes.View, []string{"box-2ba66a74c341-1", "rack12-node-0007", "operator_action_required", "normal"},
			&readmodelv1.Node{
				NodeId: uuidOne, Name: "box-2ba66a74c341-1", Connected: true, UserState: commonv1.UserState_USER_STATE_NORMAL,
				LastHeartbeatAt: ago(3 * time.Second),
				Identity:        &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE},
				Gate:            &lifecyclev1.NodeGate{Admitted: true, SlotsUsed: 1, Slots: 1, GpusUsed: 8, Gpus: 8},
				WorkspaceId:     uuidThree, Workspace: "acme/canary-7f3a91c2",
			},
			&readmodelv1.Node{
				NodeId: uuidTwo, Name: "rack12-node-0007", UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED,
				LastHeartbeatAt: ago(49 * time.Hour),
				Identity:        &recoveryv1.NodeIdentity{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED},
				Reason:          "identity_revoked_or_fenced",
				Gate:            &lifecyclev1.NodeGate{Cordoned: true, Slots: 4, Gpus: 8},
			}),
		listed("workspaces", workspaces.View,
			[]string{"research-platform", "canary-7f3a91c2-training-run", "decommissioning", "active"},
			&readmodelv1.Workspace{
				WorkspaceId: uuidOne, Tenant: "research-platform", Name: "canary-7f3a91c2-training-run",
				State:     commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
				UserState: commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED, Epoch: 12, CurrentStep: "Stop the workloads",
				Stalled: true, NodeId: uuidTwo, NodeName: "box-2ba66a74c341-1", StateAt: ago(16 * time.Minute),
				LastError: longError,
				Reason:    "agent_down",
			},
			&readmodelv1.Workspace{
				WorkspaceId: uuidTwo, Tenant: "acme", Name: "demo2", State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
				Epoch: 1, StateAt: ago(30 * time.Hour), UserState: commonv1.UserState_USER_STATE_NORMAL, AgentConnected: true,
				NodeName: "box-91c2ba66a743-1",
			}),
		listed("timeline", workspaces.TimelineView,
			[]string{"undo Wait for workloads ready", "failed (stalled)", "succeeded", "/opt/trainer/bin/serve:", "directory"},
			&readmodelv1.TimelineItem{
				Step: "1", Name: "Reserve a slot", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 1,
				State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, StartedAt: ago(time.Hour), DurationSeconds: 0.25,
			},
			&readmodelv1.TimelineItem{
				Step: "7", Name: "Wait for workloads ready", Direction: commonv1.Direction_DIRECTION_DO, Attempt: 2,
				State: commonv1.AttemptState_ATTEMPT_STATE_FAILED, Stalled: true, StartedAt: ago(30 * time.Minute),
				DurationSeconds: 1800, Error: longError,
				ErrorLayer: commonv1.OwnerLayer_OWNER_LAYER_RUNTIME,
			},
			&readmodelv1.TimelineItem{
				Step: "7", Name: "Wait for workloads ready", Direction: commonv1.Direction_DIRECTION_UNDO, Attempt: 1,
				State: commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED, StartedAt: ago(time.Minute), DurationSeconds: 0.5,
			}),
		listed("runs", workspaces.RunView, []string{"retry", "0f4e1b6a9d31", "succeeded"},
			&readmodelv1.RunBrief{
				RunId: uuidOne, Kind: commonv1.OperationKind_OPERATION_KIND_RETRY, State: commonv1.RunState_RUN_STATE_SUCCEEDED,
				StartedAt: ago(time.Hour), EndedAt: ago(time.Minute), FailedStep: "Wait for workloads ready", Shown: true,
			}),
		listed("actions", workspaces.ActionView, []string{"decommission", "retry-undo"},
			&lifecyclev1.ActionOption{
				Kind: commonv1.OperationKind_OPERATION_KIND_DECOMMISSION, Possible: true,
				Consequence: "ends the workspace for good: stops its workloads, deletes its storage and gives back 8 GPUs",
			},
			&lifecyclev1.ActionOption{
				Kind:   commonv1.OperationKind_OPERATION_KIND_RETRY_UNDO,
				Unmet:  []string{"the workspace is stuck; it is active", "no operation is open"},
				Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
			}),
		listed("tasks", nodes.TaskView,
			[]string{"orbit.launch (of a newer version)", "outcome_unknown", "0f4e1b6a9d31", "2e3f405"},
			&readmodelv1.Task{
				TaskId: uuidOne, Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeId: uuidThree, NodeName: "box-2ba66a74c341-1",
				State: commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN, Attempt: 3, CreatedAt: ago(26 * time.Hour),
				Reason: commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED,
			},
			&readmodelv1.Task{
				TaskId: uuidTwo, NodeId: uuidThree, NodeName: "rack12-node-0007", Unknown: "orbit.launch",
				State: commonv1.TaskState_TASK_STATE_QUEUED, CreatedAt: ago(time.Second),
			}),
		listed("instances", inventory.InstanceView, []string{"canary-7f3a91c2-training-run", "ended", "live"},
			&lifecyclev1.Instance{
				InstanceId: uuidOne, WorkspaceId: uuidTwo, WorkspaceName: "canary-7f3a91c2-training-run", Epoch: 12,
				State: commonv1.InstanceState_INSTANCE_STATE_ENDED, Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_DOCKER,
				ProviderId: "docker:7f3a91c2ba66a74c3417f3a91c2ba66a74c341", StartedAt: ago(26 * time.Hour),
				EndedAt: ago(time.Hour), NodeId: uuidThree,
			},
			&lifecyclev1.Instance{
				InstanceId: uuidTwo, WorkspaceId: uuidThree, Unaccounted: true, State: commonv1.InstanceState_INSTANCE_STATE_LIVE,
				ProviderId: "process:4242",
			}),
		listed("claims", inventory.ClaimView, []string{"storage", "ws-01a202dafe6f713cac640f4e1b6a9d31", "orphaned"},
			&lifecyclev1.Claim{
				ClaimId: uuidOne, WorkspaceId: uuidTwo, Kind: "storage", Name: "ws-01a202dafe6f713cac640f4e1b6a9d31",
				Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL, OrphanedAt: ago(time.Hour), OrphanedBy: "ana@example.org",
				OrphanReason: "rack 12 is dead", NodeId: uuidThree,
			}),
		listed("allocations", inventory.AllocationView, []string{"release_failed", "0f4e1b6a9d31", "acme/canary-7f3a91c2"},
			&lifecyclev1.Allocation{
				AllocationId: uuidOne, WorkspaceId: uuidTwo, Epoch: 12,
				State: commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED, Workspace: "acme/canary-7f3a91c2",
				Occupancy: "cleanup", Placement: commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS, NodeId: uuidThree, Fence: 14,
				StateAt: ago(20 * time.Minute), LastError: longError,
			}),
		listed("findings", records.FindingView, []string{"p0", "open, node cordoned", "0f4e1b6a9d31"},
			&lifecyclev1.Finding{
				FindingId: uuidOne, Severity: commonv1.Severity_SEVERITY_P0, Kind: commonv1.FindingKind(1),
				SubjectType: "workspace", SubjectId: uuidTwo, FirstSeenAt: ago(26 * time.Hour), Count: 1041, Cordoned: true,
				Summary: "the allocation is released and its instance still runs on the node",
			}),
		listed("incidents", records.IncidentView, []string{"P0", "0f4e1b6a9d31"},
			&recoveryv1.Incident{
				IncidentId: uuidOne, Kind: commonv1.IncidentKind(1), Severity: commonv1.Severity_SEVERITY_P0,
				WorkspaceIds: []string{uuidTwo, uuidThree},
				Summary:      "7 nodes share cert_untrusted_by_ingress: repair the rendering of the authority first",
				OpenedAt:     ago(26 * time.Hour),
			}),
		listed("recoveries", records.RecoveryView, []string{"research-platform/canary-7f3a91c2-training-run"},
			&recoveryv1.RecoveryRecord{
				RecordId: uuidOne, Workspace: "research-platform/canary-7f3a91c2-training-run", DetectedAt: ago(26 * time.Hour),
				Step: "Wait for workloads ready", WhatWorked: "by itself", TotalSeconds: 1198,
				WithheldBecause: "the fleet brake is engaged",
				NextAt:          ago(-time.Minute),
			}),
		listed("audit", records.AuditView, []string{
			"1h0m ago", "ana.maria.longname@example.org", "workspace.decommission", "refused",
			"workspace acme/canary-7f3a91c2",
		},
			&readmodelv1.AuditRow{Number: 1048576, Workspace: "acme/canary-7f3a91c2", Entry: &commonv1.AuditEntry{
				At: ago(time.Hour), Action: "workspace.decommission", Outcome: "refused", Actor: "ana.maria.longname@example.org",
				SubjectType: "workspace", SubjectId: uuidTwo, Count: 12,
				Reason: "the workspace belongs to another tenant, and the person may not operate it",
			}}),
		listed("tenants", inventory.TenantView, []string{"research-platform"},
			&lifecyclev1.Tenant{
				TenantId: uuidOne, Name: "research-platform",
				Quota: &lifecyclev1.Quota{Workspaces: 100, Gpus: 64, StorageBytes: 1 << 40}, CreatedAt: ago(99 * time.Hour),
			}),
		listed("policies", controlplane.PolicyView, []string{"node.heartbeat_stale_after_seconds", "300"},
			&recoveryv1.PolicyKey{
				Key: "node.heartbeat_stale_after_seconds", Value: "300", DefaultValue: "90", Minimum: "15", Maximum: "3600",
				Overridden: true, UpdatedBy: "ana.maria.longname@example.org",
				Meaning: "how old the last heartbeat may be before silence counts",
			}),
		listed("reasons", controlplane.ReasonView, []string{"policy_weakening_unacknowledged"},
			&readmodelv1.ReasonText{
				Code: "policy_weakening_unacknowledged", Meaning: "the new value weakens a promise, and nobody has accepted that",
				NextAction: "say so with --acknowledge-weakening",
			}),
		{"status", []string{"lock_store", "down"}, func(pr *output.Printer) error {
			return output.Table(pr, controlplane.ComponentColumns, []*readmodelv1.ComponentStatus{
				{Name: "database", Ok: true, ObservedAt: ago(time.Second)},
				{
					Name: "lock_store", State: commonv1.PartState_PART_STATE_DOWN,
					Detail: "dial tcp 127.0.0.1:6379: connect: connection refused", ObservedAt: ago(2 * time.Second),
					Since: ago(time.Hour), NextAction: "start Redis again; leases are kept in the database meanwhile",
					Severity: commonv1.Severity_SEVERITY_P1,
				},
			})
		}},
	}
}
