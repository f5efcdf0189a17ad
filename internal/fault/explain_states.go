package fault

import (
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// StateCatalogue returns the explanations of the reasons that workspaces, runs and allocations show of themselves and
// that no refusal, verdict, diagnostic, finding or incident has.
func StateCatalogue() []Explanation { return slices.Clone(states) }

// states are the explanations of the texts that a workspace, its run or its hold has as a reason beside the reasons of
// refusals. Like the catalogue they are part of every build, so that they can be explained while the mesh
// cannot be reached.
var states = []Explanation{
	{
		Code: "driver_silent", Meaning: "the operation is due, and no replica of lifecycle has taken it up",
		Impact: "the operation stands still; what runs goes on", Owner: ownerLifecycle,
		NextAction: "look with `gpuaas status` at the replicas of lifecycle and at its database; the operation goes on " +
			"once a replica takes it up",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "undo_exhausted", Meaning: "a step of the way back failed as often as it may be tried; the workspace is " +
			"stuck until a person decides",
		Impact: "what the step should have taken back may still be there; other workspaces are not touched",
		Owner:  ownerOperator,
		NextAction: "remove the cause, then `gpuaas workspaces retry-undo WS`; or `gpuaas workspaces skip-undo WS` once " +
			"what the step made is gone",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "run_stalled", Meaning: "the whole operation has taken longer than its budget, however well its steps go on; " +
			"the flag stops nothing",
		Impact: "the operation goes on; other workspaces are not touched", Owner: ownerLifecycle,
		NextAction: "read with `gpuaas workspaces timeline WS` which step took the time, then wait for it or cancel with " +
			"`gpuaas workspaces cancel WS`",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "step_stalled", Meaning: "the step under way has shown no progress for longer than its budget, and has not " +
			"succeeded since; the flag stops nothing",
		Impact: "the operation goes on waiting; other workspaces are not touched", Owner: "lifecycle",
		NextAction: "read the likely cause and the advice of `gpuaas workspaces timeline`; an instance that does not " +
			"connect is replaced by the watchdog within its budgets; " +
			"else cancel, reset and retry",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "register_failing", Meaning: "the workspace's instance is refused when it registers; `gpuaas workspaces " +
			"get` shows the count and the last refusal",
		Impact: "the workspace waits for its instance, whose agent asks again by itself; other workspaces are not " +
			"touched",
		Owner: "recovery",
		NextAction: "wait: the gate opens again for the instance of the present epoch; if the count goes on growing, " +
			"recreate the workspace",
		Action: commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "workload_stopped", Meaning: "a workload of an active workspace has ended and is not restarted: its restart " +
			"policy leaves it so",
		Impact: "what the workload did is done or has failed; its node, other workspaces and the platform are fine",
		Owner:  "workload",
		NextAction: "read its output with `gpuaas workspaces logs`; if it failed, correct what it depends on and recreate " +
			"the workspace",
		Action: commonv1.Action_ACTION_STOP,
	},
	{
		Code: "operation_joined", Meaning: "an operation that serves the request was under way: the request was joined to " +
			"it and began nothing",
		Impact: "none: one operation runs, for all callers who asked", Owner: "lifecycle",
		NextAction: "wait for the operation whose id was answered",
		Action:     commonv1.Action_ACTION_WAIT,
	},
	{
		Code: "release_failed", Meaning: "what an allocation has left on its node could not be cleaned up before the " +
			"deadline",
		Impact: "the node is cordoned and the allocation stays occupied; what already runs on the node goes on",
		Owner:  "lifecycle",
		NextAction: "bring the node back and `gpuaas allocations retry-release`; or `gpuaas allocations force-release` " +
			"with evidence and a reason",
		Action: commonv1.Action_ACTION_WAIT,
	},
}
