package policy

import (
	"slices"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// StateRow describes how a state is left; every state has a way out.
type StateRow struct {
	Enum     protoreflect.FullName
	State    string // as names.Of spells it
	Terminal bool

	// How long the state may last, or for a steady state how old the evidence for it may be: the value of BudgetKey, or
	// Budget if there is no key. Both are empty for a terminal state. Nodes whose identity is past it are an incident of
	// kind state_overdue. Of other rows, a key of silence, stalls and sweeps is read by what watches that state too, and
	// any other budget has no effect by itself.
	BudgetKey string
	Budget    time.Duration

	Exits []string // states of the same enum; of a terminal state, what an operator may reopen it to

	Owner string // the service that moves the state on
	// Verb is the operator's command that moves the state on when nothing else does; empty for a terminal state that
	// cannot be reopened.
	Verb string
	// Leads is the exit that a state without a verb takes by itself once its retries and deadlines are used up: an
	// operator can only wait for it, and then use the verbs of that state.
	Leads string
}

// BudgetWithin returns the state's budget under a policy, zero for a terminal state.
func (r StateRow) BudgetWithin(s Set) time.Duration {
	if r.BudgetKey != "" {
		return s.Duration(r.BudgetKey)
	}
	return r.Budget
}

// States returns every row, by enum and in the order of its values.
func States() []StateRow {
	out := slices.Clone(states)
	for i := range out {
		out[i].Exits = slices.Clone(out[i].Exits)
	}
	return out
}

const (
	nodeapi   = "nodeapi"
	lifecycle = "lifecycle"
	recovery  = "recovery"
)

// row begins the row of a state that is left for the given ones.
func row[E protoreflect.Enum](owner, verb string, state E, exits ...E) StateRow {
	r := StateRow{Enum: state.Descriptor().FullName(), State: names.Of(state), Owner: owner, Verb: verb}
	for _, e := range exits {
		r.Exits = append(r.Exits, names.Of(e))
	}
	return r
}

func (r StateRow) lasting(d time.Duration) StateRow {
	r.Budget = d
	return r
}

func (r StateRow) key(name string) StateRow {
	r.BudgetKey = name
	return r
}

// leads sets the exit that a state without a verb takes at the latest.
func (r StateRow) leads(to protoreflect.Enum) StateRow {
	r.Leads = names.Of(to)
	return r
}

func (r StateRow) end() StateRow {
	r.Terminal = true
	return r
}

// states is never written after the process starts.
var states = slices.Concat(identityStates, sessionStates, taskStates, workspaceStates, placementStates)

var identityStates = []StateRow{
	row(recovery, "nodes retire", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_PENDING,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).key(RecoveryTokenMaxAgeSeconds),
	row(recovery, "nodes hold", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).key(HeartbeatStaleAfterSeconds),
	row(recovery, "nodes reactivate", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_HELD,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).key(BudgetP1RecoverSeconds),
	row(recovery, "nodes reactivate", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_QUARANTINED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE, commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).key(BudgetP2RecoverSeconds),
	row(recovery, "nodes reactivate", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_FENCED,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
		commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).key(FencedReviewSeconds),
	row(recovery, "", commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED).end(),

	row(recovery, "nodes bundle", commonv1.SerialState_SERIAL_STATE_NEXT,
		commonv1.SerialState_SERIAL_STATE_CURRENT, commonv1.SerialState_SERIAL_STATE_SUPERSEDED,
		commonv1.SerialState_SERIAL_STATE_REVOKED).key(CertificateTTLSeconds),
	row(recovery, "nodes bundle", commonv1.SerialState_SERIAL_STATE_CURRENT,
		commonv1.SerialState_SERIAL_STATE_SUPERSEDED, commonv1.SerialState_SERIAL_STATE_REVOKED).key(CertificateTTLSeconds),
	row(recovery, "", commonv1.SerialState_SERIAL_STATE_SUPERSEDED).end(),
	row(recovery, "", commonv1.SerialState_SERIAL_STATE_REVOKED).end(),

	row(recovery, "tokens revoke", commonv1.TokenState_TOKEN_STATE_ISSUED,
		commonv1.TokenState_TOKEN_STATE_USED, commonv1.TokenState_TOKEN_STATE_REVOKED,
		commonv1.TokenState_TOKEN_STATE_EXPIRED).key(RecoveryTokenMaxAgeSeconds),
	// A used token is still accepted from the same key, so it can still be revoked.
	row(recovery, "tokens revoke", commonv1.TokenState_TOKEN_STATE_USED,
		commonv1.TokenState_TOKEN_STATE_REVOKED, commonv1.TokenState_TOKEN_STATE_EXPIRED).key(RecoveryTokenMaxAgeSeconds),
	row(recovery, "", commonv1.TokenState_TOKEN_STATE_REVOKED).end(),
	row(recovery, "", commonv1.TokenState_TOKEN_STATE_EXPIRED).end(),
}

var sessionStates = []StateRow{
	row(nodeapi, "nodes hold", commonv1.SessionState_SESSION_STATE_OPENING,
		commonv1.SessionState_SESSION_STATE_ADMITTED, commonv1.SessionState_SESSION_STATE_CLOSED).lasting(30 * time.Second),
	row(nodeapi, "nodes hold", commonv1.SessionState_SESSION_STATE_ADMITTED,
		commonv1.SessionState_SESSION_STATE_DRAINING, commonv1.SessionState_SESSION_STATE_CLOSED).key(StreamMaxAgeSeconds),
	row(nodeapi, "nodes hold", commonv1.SessionState_SESSION_STATE_DRAINING,
		commonv1.SessionState_SESSION_STATE_CLOSED).lasting(30 * time.Second),
	row(nodeapi, "", commonv1.SessionState_SESSION_STATE_CLOSED).end(),
}

var taskStates = []StateRow{
	row(lifecycle, "tasks cancel", commonv1.TaskState_TASK_STATE_QUEUED,
		commonv1.TaskState_TASK_STATE_DISPATCHED, commonv1.TaskState_TASK_STATE_EXPIRED,
		commonv1.TaskState_TASK_STATE_CANCELLED, commonv1.TaskState_TASK_STATE_SUPERSEDED).key(TaskStaleSweepIntervalSeconds),
	row(lifecycle, "tasks cancel", commonv1.TaskState_TASK_STATE_DISPATCHED,
		commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_DELIVERED, commonv1.TaskState_TASK_STATE_RUNNING,
		commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_FAILED,
		commonv1.TaskState_TASK_STATE_CANCELLED, commonv1.TaskState_TASK_STATE_SUPERSEDED,
		commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN).key(TaskStaleSweepIntervalSeconds),
	row(lifecycle, "tasks cancel", commonv1.TaskState_TASK_STATE_DELIVERED,
		commonv1.TaskState_TASK_STATE_DISPATCHED, commonv1.TaskState_TASK_STATE_RUNNING,
		commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_FAILED,
		commonv1.TaskState_TASK_STATE_CANCELLED, commonv1.TaskState_TASK_STATE_SUPERSEDED,
		commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN).key(TaskStaleSweepIntervalSeconds),
	row(lifecycle, "tasks cancel", commonv1.TaskState_TASK_STATE_RUNNING,
		commonv1.TaskState_TASK_STATE_SUCCEEDED, commonv1.TaskState_TASK_STATE_FAILED,
		commonv1.TaskState_TASK_STATE_CANCELLED, commonv1.TaskState_TASK_STATE_SUPERSEDED,
		commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN).key(SagaStepStallSeconds),
	row(lifecycle, "", commonv1.TaskState_TASK_STATE_SUCCEEDED).end(),
	row(lifecycle, "", commonv1.TaskState_TASK_STATE_FAILED).end(),
	row(lifecycle, "tasks requeue", commonv1.TaskState_TASK_STATE_EXPIRED, commonv1.TaskState_TASK_STATE_QUEUED).end(),
	row(lifecycle, "", commonv1.TaskState_TASK_STATE_CANCELLED).end(),
	row(lifecycle, "", commonv1.TaskState_TASK_STATE_SUPERSEDED).end(),
	row(lifecycle, "tasks requeue|close", commonv1.TaskState_TASK_STATE_OUTCOME_UNKNOWN,
		commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_FAILED).end(),
}

var workspaceStates = []StateRow{
	row(lifecycle, "workspaces cancel", commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_STUCK).key(SagaStallSeconds),
	row(lifecycle, "workspaces recreate|decommission", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING).key(HeartbeatStaleAfterSeconds),
	row(lifecycle, "workspaces reset|retry|recreate|decommission", commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING, commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING).key(BudgetP1RecoverSeconds),
	row(lifecycle, "workspaces retry-undo|skip-undo|decommission", commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED).key(BudgetP1RecoverSeconds),
	row(lifecycle, "", commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK).key(SagaStallSeconds).
		leads(commonv1.WorkspaceState_WORKSPACE_STATE_STUCK),
	row(lifecycle, "workspaces cancel", commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING,
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
		commonv1.WorkspaceState_WORKSPACE_STATE_STUCK).key(SagaStallSeconds),
	row(lifecycle, "", commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED).key(SagaStallSeconds).leads(
		commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
	),
	row(lifecycle, "", commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED).end(),

	row(lifecycle, "workspaces cancel", commonv1.RunState_RUN_STATE_PENDING,
		commonv1.RunState_RUN_STATE_RUNNING, commonv1.RunState_RUN_STATE_COMPENSATING).key(SagaStepStallSeconds),
	row(lifecycle, "workspaces cancel", commonv1.RunState_RUN_STATE_RUNNING,
		commonv1.RunState_RUN_STATE_WAITING, commonv1.RunState_RUN_STATE_SUCCEEDED, commonv1.RunState_RUN_STATE_COMPENSATING,
		commonv1.RunState_RUN_STATE_FAILED).key(SagaStallSeconds),
	row(lifecycle, "workspaces cancel", commonv1.RunState_RUN_STATE_WAITING,
		commonv1.RunState_RUN_STATE_RUNNING, commonv1.RunState_RUN_STATE_COMPENSATING).key(SagaWaitReadyStallSeconds),
	row(lifecycle, "", commonv1.RunState_RUN_STATE_COMPENSATING,
		commonv1.RunState_RUN_STATE_FAILED,
		commonv1.RunState_RUN_STATE_STUCK).key(SagaStallSeconds).leads(commonv1.RunState_RUN_STATE_STUCK),
	row(lifecycle, "", commonv1.RunState_RUN_STATE_SUCCEEDED).end(),
	row(lifecycle, "", commonv1.RunState_RUN_STATE_FAILED).end(),
	row(lifecycle, "workspaces retry-undo|skip-undo", commonv1.RunState_RUN_STATE_STUCK,
		commonv1.RunState_RUN_STATE_COMPENSATING, commonv1.RunState_RUN_STATE_FAILED).key(BudgetP1RecoverSeconds),

	row(lifecycle, "workspaces cancel", commonv1.AttemptState_ATTEMPT_STATE_RUNNING,
		commonv1.AttemptState_ATTEMPT_STATE_WAITING, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		commonv1.AttemptState_ATTEMPT_STATE_FAILED, commonv1.AttemptState_ATTEMPT_STATE_CANCELLED,
		commonv1.AttemptState_ATTEMPT_STATE_LOST, commonv1.AttemptState_ATTEMPT_STATE_ABANDONED).key(SagaStepStallSeconds),
	row(lifecycle, "workspaces cancel", commonv1.AttemptState_ATTEMPT_STATE_WAITING,
		commonv1.AttemptState_ATTEMPT_STATE_RUNNING, commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED,
		commonv1.AttemptState_ATTEMPT_STATE_FAILED, commonv1.AttemptState_ATTEMPT_STATE_CANCELLED,
		commonv1.AttemptState_ATTEMPT_STATE_LOST,
		commonv1.AttemptState_ATTEMPT_STATE_ABANDONED).key(SagaWaitReadyStallSeconds),
	row(lifecycle, "", commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED).end(),
	row(lifecycle, "", commonv1.AttemptState_ATTEMPT_STATE_FAILED).end(),
	row(lifecycle, "", commonv1.AttemptState_ATTEMPT_STATE_CANCELLED).end(),
	row(lifecycle, "", commonv1.AttemptState_ATTEMPT_STATE_LOST).end(),
	row(lifecycle, "", commonv1.AttemptState_ATTEMPT_STATE_ABANDONED).end(),
}

var placementStates = []StateRow{
	row(lifecycle, "workspaces cancel", commonv1.AllocationState_ALLOCATION_STATE_ALLOCATING,
		commonv1.AllocationState_ALLOCATION_STATE_ACTIVE,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASING).key(SagaStepStallSeconds),
	row(lifecycle, "workspaces decommission", commonv1.AllocationState_ALLOCATION_STATE_ACTIVE,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASING).key(HeartbeatStaleAfterSeconds),
	row(lifecycle, "allocations retry-release", commonv1.AllocationState_ALLOCATION_STATE_RELEASING,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASED,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED).key(SagaStepStallSeconds),
	row(lifecycle, "", commonv1.AllocationState_ALLOCATION_STATE_RELEASED).end(),
	row(lifecycle, "allocations retry-release|force-release", commonv1.AllocationState_ALLOCATION_STATE_RELEASE_FAILED,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASING,
		commonv1.AllocationState_ALLOCATION_STATE_RELEASED).key(BudgetP1RecoverSeconds),

	row(lifecycle, "workspaces cancel", commonv1.InstanceState_INSTANCE_STATE_PREPARED,
		commonv1.InstanceState_INSTANCE_STATE_LAUNCHING,
		commonv1.InstanceState_INSTANCE_STATE_ENDED).key(SagaStepStallSeconds),
	row(lifecycle, "workspaces cancel", commonv1.InstanceState_INSTANCE_STATE_LAUNCHING,
		commonv1.InstanceState_INSTANCE_STATE_LIVE, commonv1.InstanceState_INSTANCE_STATE_ENDING,
		commonv1.InstanceState_INSTANCE_STATE_ENDED).key(SagaStepStallSeconds),
	row(lifecycle, "workspaces recreate|decommission", commonv1.InstanceState_INSTANCE_STATE_LIVE,
		commonv1.InstanceState_INSTANCE_STATE_ENDING,
		commonv1.InstanceState_INSTANCE_STATE_ENDED).key(HeartbeatStaleAfterSeconds),
	row(lifecycle, "workspaces retry-undo|skip-undo", commonv1.InstanceState_INSTANCE_STATE_ENDING,
		commonv1.InstanceState_INSTANCE_STATE_ENDED).key(SagaStepStallSeconds),
	row(lifecycle, "", commonv1.InstanceState_INSTANCE_STATE_ENDED).end(),
}
