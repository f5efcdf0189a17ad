package runbook

import "slices"

// StepInstance is the step that has an instance launched and waits until its agent has a session. Lifecycle uses the
// name for its step, and the watchdog finds the step by it.
const StepInstance = "Allocate storage"

// Row is the entry of the runbook for one step.
type Row struct {
	Step   string // its name, as the timeline shows it
	Cause  string // the usual cause of a stall or failure
	Advice string // what a person does next
}

// Of returns the row of a step; the bool is false if there is none.
func Of(step string) (Row, bool) {
	i := slices.IndexFunc(rows, func(r Row) bool { return r.Step == step })
	if i < 0 {
		return Row{}, false
	}
	return rows[i], true
}

// OfWorkload returns the row of a step that failed because the tenant's workload ended: the row of the step itself
// would look for the cause in the platform.
func OfWorkload(step string) Row {
	return Row{
		Step:  step,
		Cause: "the tenant's workload ends, or starts and ends again and again; its node and the platform work",
		Advice: "this is the tenant's, not the platform's: read the last output, correct the command, the image or the " +
			"environment, and create the " +
			"workspace anew",
	}
}

// Rows returns all of them, in the order in which the steps come.
func Rows() []Row { return slices.Clone(rows) }

// patience is the remedy for every step of a teardown: a teardown is never undone, so the step is retried or skipped.
const patience = "once that is repaired, `gpuaas workspaces retry-undo WS`; if it never will be, " +
	"`gpuaas workspaces skip-undo WS --reason TEXT` leaves an orphan claim and goes on"

var rows = []Row{
	{
		Step: "Validate request",
		Cause: "the request does not fit what the mesh offers: its plan, region, quota or schema. It fails at once and " +
			"hardly ever hangs",
		Advice: "cancel, correct the request, create it again",
	},
	{
		Step: "End previous box",
		Cause: "the placement does not confirm that the instance of the former epoch has ended, or the machine that holds " +
			"the workspace cannot be reached",
		Advice: "look at the node and at the placement's own list: the next epoch never starts before the former is " +
			"confirmed ended; for a machine that never " +
			"comes back, `gpuaas workspaces cancel WS`, and once it is failed `gpuaas workspaces recreate WS --fenced-proof " +
			"PROOF --reason TEXT`",
	},
	{
		Step:  StepInstance,
		Cause: "no slot, device or storage is free, the instance does not start, or its agent cannot enrol",
		Advice: "look at the platform's health, at free capacity and at the workspace's register failures; after five " +
			"minutes without progress the " +
			"watchdog replaces an instance that does not connect, within its budgets; otherwise cancel, reset and retry",
	},
	{
		Step:   "Allocate workflow handle",
		Cause:  "the control plane could not write the workspace's handle",
		Advice: "the control plane is at fault: look at lifecycle and its database, and escalate",
	},
	{
		Step:   "Apply per-tenant schema",
		Cause:  "the workload database refused a statement of a migration, or does not answer",
		Advice: "read the step's error; if it was temporary, reset and retry",
	},
	{
		Step:   "Deploy tenant workloads",
		Cause:  "a workload's image, command or device is not available on the node, or the node does not answer",
		Advice: "cancel, reset, retry; if it fails again, look at the task's error on the node",
	},
	{
		Step:   "Wait for workloads ready",
		Cause:  "the workloads run and do not become healthy",
		Advice: "give it ten minutes; then read the workloads' output and readiness, and escalate",
	},
	{
		Step:   "Mark active",
		Cause:  "the last change of state was not committed; this is rare",
		Advice: "reset and retry: everything that was made is kept, and only the last change is tried again",
	},
	{
		Step:   "Remove tenant workloads",
		Cause:  "the node does not answer, or a workload does not stop",
		Advice: "look at the node's session and the task's error; " + patience,
	},
	{
		Step:   "Drop per-tenant schema",
		Cause:  "the workload database does not answer, or a session still has the schema open",
		Advice: "look at the workload database and its open sessions; " + patience,
	},
	{
		Step:   "Release workflow handle",
		Cause:  "the control plane could not remove the workspace's handle",
		Advice: "the control plane is at fault: look at lifecycle and its database; " + patience,
	},
	{
		Step: "Release storage and box",
		Cause: "the placement does not confirm the end of the instance, or the machine that holds the storage cannot be " +
			"reached",
		Advice: "look at the node and at the placement's own list; " + patience,
	},
	{
		Step:   "Mark decommissioned",
		Cause:  "the last change of state was not committed; this is rare",
		Advice: "look at lifecycle's database; " + patience,
	},
	{
		Step:   "Mark released",
		Cause:  "the last change of state was not committed; this is rare",
		Advice: "look at lifecycle's database; " + patience,
	},
}
