package fault

import (
	"time"

	"connectrpc.com/connect"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

var taskRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_TASK_SUPERSEDED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerLifecycle,
		Public: "the task's epoch or operation sequence is lower than one already seen for this workspace",
		Remedy: "nothing: a later operation has the workspace",
		Impact: "this task only; it had no effect",
	},
	commonv1.Reason_REASON_TASK_SIGNATURE_INVALID: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerSecurity,
		Public: "the task is not signed by a key that this node trusts",
		Remedy: "compare the node's task signing keys with the mesh's; rotate them with overlap",
		Impact: "this task only; it had no effect",
	},
	commonv1.Reason_REASON_TASK_WRONG_NODE: {
		Code: connect.CodePermissionDenied, Action: stop, Owner: ownerSecurity,
		Public: "the task is signed for another node",
		Remedy: "find out how it came here; it was not run",
		Impact: "this task only; it had no effect",
	},
	commonv1.Reason_REASON_TASK_OUTSIDE_WINDOW: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerLifecycle,
		Public: "the task may not be started at this time",
		Remedy: "ask for it again, if it is still wanted; check the node's clock",
		Impact: "this task only; it had no effect",
	},
	commonv1.Reason_REASON_TASK_TYPE_UNSUPPORTED: {
		Code: connect.CodeUnimplemented, Action: stop, Owner: ownerOperator,
		Public: "this agent does not know that type of task",
		Remedy: "update the agent first, then ask for the work again",
		Impact: "work of this type is refused on this node",
	},
	commonv1.Reason_REASON_TASK_NOT_CURRENT: {
		Code: connect.CodeAborted, Action: stop, Owner: ownerLifecycle,
		Public: "the report names an attempt or a session that is not the current one",
		Remedy: "nothing: it is kept as late evidence",
		Impact: "none: the task's state is unchanged",
	},
	commonv1.Reason_REASON_TASK_FINISHED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the task has ended",
		Remedy: "start a new one, if it is still wanted",
		Impact: "none: the task's state is unchanged",
	},
	commonv1.Reason_REASON_NODE_NOT_CONNECTED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerOperator,
		Public: "the agent of the node has no session now",
		Remedy: "ask again when the node is connected: `gpuaas nodes get` shows it",
		Impact: "this request only: what runs on the node goes on",
	},
	commonv1.Reason_REASON_AGENT_OUTDATED: {
		Code: connect.CodeUnimplemented, Action: stop, Owner: ownerOperator,
		Public: "the agent of the node is of a version that does not know this request",
		Remedy: "update the agent of the node, then ask again",
		Impact: "this request only: the rest of the agent's work goes on",
	},
	commonv1.Reason_REASON_AGENT_BUSY: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 2 * time.Second, Owner: ownerAgent,
		Public: "the agent runs as many tasks of this kind as it may",
		Remedy: "wait: the task is offered again",
		Impact: "this task waits",
	},
}

var workspaceRows = map[commonv1.Reason]Row{
	commonv1.Reason_REASON_WORKSPACE_NAME_TAKEN: {
		Code: connect.CodeAlreadyExists, Action: stop, Owner: ownerCaller,
		Public: "the tenant has a workspace of that name with another specification",
		Remedy: "choose another name, or decommission the one that has it",
		Impact: "only this request: nothing was created",
	},
	commonv1.Reason_REASON_TENANT_UNKNOWN: {
		Code: connect.CodeNotFound, Action: stop, Owner: ownerCaller,
		Public: "there is no such tenant",
		Remedy: "`gpuaas tenants list` shows those that exist; an operator creates new ones",
		Impact: "only this request: nothing was created",
	},
	commonv1.Reason_REASON_QUOTA_EXCEEDED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the tenant's quota does not allow this",
		Remedy: "ask for less, decommission something, or have the quota raised",
		Impact: "only this request: nothing was created",
	},
	commonv1.Reason_REASON_REGION_UNAVAILABLE: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the region is not offered here",
		Remedy: "choose a region that this mesh serves",
		Impact: "only this request: nothing was created",
	},
	commonv1.Reason_REASON_PLAN_UNKNOWN: {
		Code: connect.CodeInvalidArgument, Action: stop, Owner: ownerCaller,
		Public: "there is no plan of that name",
		Remedy: "choose a plan that this mesh offers",
		Impact: "only this request: nothing was created",
	},
	commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the placement driver is not available here",
		Remedy: "choose another placement, or configure the driver",
		Impact: "only workspaces with this placement",
	},
	commonv1.Reason_REASON_NO_CAPACITY: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 15 * time.Second, Owner: ownerOperator,
		Public: "no node has room for this now",
		Remedy: "add nodes, uncordon one, or wait until something is released",
		Impact: "new workspaces of this size wait; running ones go on",
	},
	commonv1.Reason_REASON_OPERATION_IN_PROGRESS: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerCaller,
		Public: "another operation on this workspace is open",
		Remedy: "wait for it, or cancel it first",
		Impact: "only this request: the open operation goes on",
	},
	commonv1.Reason_REASON_IDEMPOTENCY_KEY_REUSED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the idempotency key was used before for another request",
		Remedy: "draw a fresh key for each new request",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_NOT_RESET: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the failed run has not been reset",
		Remedy: "`gpuaas workspaces reset WS`, then retry",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_RETRY_LIMIT_REACHED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the workspace has been retried as often as the window allows",
		Remedy: "look at why it fails; then override with a reason, or decommission",
		Impact: "this workspace stays failed and clean",
	},
	commonv1.Reason_REASON_RUN_STUCK: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "the run could not undo what it made and waits for an operator",
		Remedy: "retry-undo, skip-undo, or decommission the workspace",
		Impact: "this workspace is locked; what it left behind is listed as claims",
	},
	commonv1.Reason_REASON_EPOCH_ENDED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerLifecycle,
		Public: "this epoch of the workspace has ended and is never launched again",
		Remedy: "recreate the workspace: it draws the next epoch",
		Impact: "only this launch",
	},
	commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: 10 * time.Second, Owner: ownerOperator,
		Public: "the instance of the previous epoch is not confirmed ended",
		Remedy: "wait until the placement confirms its end, or recreate with --fenced-proof",
		Impact: "this workspace waits, so that two of its instances never run at once",
	},
	commonv1.Reason_REASON_INSTANCE_OF_LOST_HISTORY: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerControl,
		Public: "the placement has another instance at this epoch of the workspace, which this database does not know",
		Remedy: "the database went back: follow docs/restore.md; a recreation after that draws an epoch that was never used",
		Impact: "this launch only: the other instance is neither adopted nor ended",
	},
	commonv1.Reason_REASON_LAUNCH_FAILED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerLifecycle,
		Public: "the placement driver could not launch the instance",
		Remedy: "look at the step's error in the timeline; it is tried again within its budget",
		Impact: "this workspace is not provisioned yet",
	},
	commonv1.Reason_REASON_WORKLOAD_FAILED: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the workload ended or did not become ready",
		Remedy: "look at its output and its readiness check",
		Impact: "this workspace's app; its node is fine",
	},
	commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "the workload exits again and again",
		Remedy: "read its last output in `gpuaas workspaces timeline`, or with `gpuaas workspaces logs --previous` if the " +
			"workspace is active, " +
			"correct its command, image or environment, and create the workspace anew",
		Impact: "this workspace's app; its node and the platform are fine",
	},
	commonv1.Reason_REASON_DEADLINE_OF_STEP_EXCEEDED: {
		Code: connect.CodeDeadlineExceeded, Action: stop, Owner: ownerLifecycle,
		Public: "the step did not end within its deadline",
		Remedy: "look at the timeline for what it waited for; reset and retry",
		Impact: "this workspace is compensated and ends failed",
	},
	commonv1.Reason_REASON_CANCEL_REQUESTED: {
		Code: connect.CodeCanceled, Action: stop, Owner: ownerCaller,
		Public: "the operation is being cancelled",
		Remedy: "wait until its compensations are done",
		Impact: "this workspace ends failed and clean",
	},
	commonv1.Reason_REASON_FENCED_OUT: {
		Code: connect.CodeAborted, Action: stop, Owner: ownerLifecycle,
		Public: "this worker has lost its lease on the run",
		Remedy: "nothing: another worker drives it",
		Impact: "none: what this worker would have written was refused",
	},
	commonv1.Reason_REASON_STATE_TERMINAL: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerCaller,
		Public: "it has ended and does not change any more",
		Remedy: "make a new one",
		Impact: "only this request: nothing was changed",
	},
	commonv1.Reason_REASON_STORAGE_FAILED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerAgent,
		Public: "the workspace's storage could not be made or removed on its node",
		Remedy: "look at the node's disk and the step's error; it is tried again within its budget",
		Impact: "this workspace is not provisioned or not released yet",
	},
	commonv1.Reason_REASON_NODE_DISK_FULL: {
		Code: connect.CodeResourceExhausted, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerAgent + " / host",
		Public: "the node's state directory has no room",
		Remedy: "free room on the node's disk, in the directory that the finding names; the node takes work again by " +
			"itself once its agent sees room",
		Impact: "nothing new is placed on this node and nothing is made there; what runs there goes on",
	},
	commonv1.Reason_REASON_HOST_RUNTIME_DRIFT: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: 5 * time.Minute, Owner: "provider",
		Public: "the machine of the workspace is not as it was accepted, and nothing is started on it",
		Remedy: "diagnose the node, then repair or reimage it; `gpuaas nodes accept-facts NODE --reason TEXT` if the " +
			"change was meant",
		Impact: "nothing is deployed on this node until that ends; what runs there goes on, and can be stopped and removed",
	},
	commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN: {
		Code: connect.CodeFailedPrecondition, Action: wait, RetryAfter: 30 * time.Second, Owner: ownerOperator,
		Public: "an environment value of the workspace was sealed under a key that lifecycle does not have",
		Remedy: "put the key back into lifecycle's workload_secrets_keys_file and restart lifecycle; without it, create " +
			"the workspace anew with its values",
		Impact: "the workspaces with values under that key cannot be deployed again; what runs goes on",
	},
	commonv1.Reason_REASON_WORKLOAD_SECRET_INVALID: {
		Code: connect.CodeFailedPrecondition, Action: stop, Owner: ownerOperator,
		Public: "a sealed environment value of the workspace was altered, or is of another workspace or name",
		Remedy: "create the workspace anew with its values, and find out who changed the database: `gpuaas findings list`",
		Impact: "this workspace cannot be deployed again; what runs goes on",
	},
	commonv1.Reason_REASON_SCHEMA_FAILED: {
		Code: connect.CodeUnavailable, Action: wait, RetryAfter: 5 * time.Second, Owner: ownerLifecycle,
		Public: "the workspace's database schema could not be made or removed",
		Remedy: "look at the workload database; it is tried again within its budget",
		Impact: "this workspace is not provisioned or not released yet",
	},
}
