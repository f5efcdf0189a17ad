package watchdog

import (
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/runbook"
)

// instanceStep is the step that has an instance launched and waits for its session.
const instanceStep = runbook.StepInstance

// lateRun begins the reason of a run that lasts too long as a whole, whichever step it is at.
const lateRun = "run_stalled"

// passed says whether the step at which a record's operation stalled has succeeded: the operation is at another step on
// its way forward. That an attempt of the step ended, or that the flag was taken back, says nothing of the kind. An
// operation that is late as a whole recovers with its workspace alone.
func passed(r *record, op *run) bool {
	return r.Trigger == triggerStalled && r.Step != "" && op != nil && !op.over() && op.Phase == "do" &&
		op.CancelBy == "" && op.Step != r.Step && !strings.HasPrefix(op.StuckReason, lateRun)
}

// awaitsInstance says whether an operation hangs at the step in which a launched instance of the workspace's own is to come.
func awaitsInstance(op *run, s *subject) bool {
	return op != nil && op.Stalled && op.Step == instanceStep && s.Instance == "live" && !s.static()
}

// absent says whether an operation hangs because its instance does not come: it has no session, though somebody has listened
// for long enough. No wait brings that instance, and its step would be tried again with it until the deadline of the
// operation.
func absent(op *run, s *subject) bool {
	return awaitsInstance(op, s) && s.Reach == reachLost
}

// replaceInstance decides whether another instance may help. One of our own operations whose instance does not come either is a failed
// attempt: two for the same cause, or as many as a recovery has, show that the cause does not pass. Such an operation
// is followed to its end, which is the record's.
func replaceInstance(r *record, op *run, cfg Config) request {
	switch {
	case r.ByPerson:
		return nothing
	case op.ID == r.RunID, r.Attempts < min(cfg.Attempts, 2), r.LastFailure != "" && r.Attempts < cfg.Attempts:
		return recreate
	}
	r.withhold(withheldByAttempts, fmt.Sprintf("%d recreations brought no instance that comes: the cause does not pass by itself; "+
		"find out why instances get no session", r.Attempts), nil)
	return nothing
}

// leftFailed adds to a record how the operation ended at which a person left the workspace.
func leftFailed(r *record, op *run) {
	if op == nil || op.ErrorCode == "" {
		return
	}
	r.Cause += fmt.Sprintf("; its operation ended failed at %q: %s", op.Step, op.ErrorCode)
}
