package watchdog

import (
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/internal/runbook"
)

// instanceStep is the step that launches an instance and waits for its session.
const instanceStep = runbook.StepInstance

// lateRun is the prefix of the reason of a run that takes too long as a whole, at whichever step it is.
const lateRun = "run_stalled"

// passed reports whether the step at which a record's operation stalled has succeeded: the operation is going forward
// and is at another step. The end of an attempt of the step, or the clearing of the stalled flag, is no evidence of
// that. An operation that is late as a whole has recovered only when its workspace has.
func passed(r *record, op *run) bool {
	return r.Trigger == triggerStalled && r.Step != "" && op != nil && !op.over() && op.Phase == "do" &&
		op.CancelBy == "" && op.Step != r.Step && !strings.HasPrefix(op.StuckReason, lateRun)
}

// awaitsInstance reports whether an operation hangs at the step that waits for the session of an instance that was
// launched for the workspace.
func awaitsInstance(op *run, s *subject) bool {
	return op != nil && op.Stalled && op.Step == instanceStep && s.Instance == "live" && !s.static()
}

// absent reports whether an operation hangs because its instance does not come: it has no session, though a replica of
// nodeapi has listened for long enough. Waiting longer does not help, and lifecycle would retry the step with the same
// instance until the deadline of the operation.
func absent(op *run, s *subject) bool {
	return awaitsInstance(op, s) && s.Reach == reachLost
}

// replaceInstance decides whether another instance may help. An operation of the watchdog's own whose instance does not
// come either is a failed attempt: two for the same cause, or as many as a recovery may have, show that the cause does
// not pass by itself. Such an operation is followed to its end, which ends the record.
func replaceInstance(r *record, op *run, cfg Config) request {
	switch {
	case r.ByPerson:
		return nothing
	case op.ID == r.RunID, r.Attempts < min(cfg.Attempts, 2), r.LastFailure != "" && r.Attempts < cfg.Attempts:
		return recreate
	}
	r.withhold(withheldByAttempts,
		fmt.Sprintf("%d recreations brought no instance that comes: the cause does not pass by itself; "+
			"find out why instances get no session", r.Attempts), nil)
	return nothing
}

// leftFailed adds to a record the failure of the operation after which a person left the workspace.
func leftFailed(r *record, op *run) {
	if op == nil || op.ErrorCode == "" {
		return
	}
	r.Cause += fmt.Sprintf("; its operation ended failed at %q: %s", op.Step, op.ErrorCode)
}
