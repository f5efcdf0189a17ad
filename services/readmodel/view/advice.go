package view

// advice is what usually stands behind a step that hangs or fails, and what to do about it.
type advice struct{ cause, todo string }

// stepAdvice is by the step's name.
var stepAdvice = map[string]advice{
	"Validate request": {
		cause: "the request does not fit what the mesh offers: plan, region, quota or schema",
		todo:  "cancel, correct the request, create it again",
	},
	"Allocate storage": {
		cause: "no slot or storage is free, the box does not start, or its agent cannot enrol",
		todo:  "look at the platform's health and at free capacity; after five minutes without progress cancel, reset and retry",
	},
	"Allocate workflow handle": {
		cause: "the control plane could not write the workspace's handle",
		todo:  "this is ours: look at lifecycle and its database, and escalate",
	},
	"Apply per-tenant schema": {
		cause: "a migration of the tenant's schema failed",
		todo:  "read the step's error; passing causes go away with reset and retry",
	},
	"Deploy tenant workloads": {
		cause: "a workload's image, command or device is not to be had on the node, or the node does not answer",
		todo:  "cancel, reset, retry; if it fails again, look at the task's error on the node",
	},
	"Wait for workloads ready": {
		cause: "the workloads run and do not become ready",
		todo:  "give it ten minutes; then read the workloads' output and readiness, and escalate",
	},
	"Mark active": {
		cause: "the last change of state was not committed",
		todo:  "reset and retry: everything that was made is kept and adopted",
	},
}

// AdviceOf answers the likely cause and the advice for a step, empty for one that is not known.
func AdviceOf(step string) (string, string) {
	a := stepAdvice[step]
	return a.cause, a.todo
}
