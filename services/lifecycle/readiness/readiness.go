package readiness

import (
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/showable"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// State is the result of judging the state of the workloads, for the wait until they are ready.
type State struct {
	Ready  int
	Why    string          // what is waited for
	Absent error           // a workload is not on its node
	Ended  *saga.StepError // a workload has ended for good, or is in a crash loop
}

// Of counts the ready workloads and finds what has ended. before has the number of restarts of each workload
// at its deploy. A workload that has been restarted limit times since, and has ended once more without having been
// ready, is in a crash loop.
func Of(spec *lifecyclev1.WorkspaceSpec, status *nodev1.WorkloadStatusOutput, before map[string]int32,
	limit int32,
) State {
	byName := map[string]*nodev1.WorkloadStatus{}
	for _, w := range status.GetWorkloads() {
		byName[w.GetName()] = w
	}
	var out State
	for _, w := range spec.GetWorkloads() {
		got := byName[w.GetName()]
		restarts := got.GetRestarts() - before[w.GetName()]
		if restarts < 0 { // it was started afresh since
			restarts = got.GetRestarts()
		}
		switch {
		case got.GetReady():
			out.Ready++
		case got == nil || got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT:
			out.Absent = saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_WORKLOAD_FAILED,
				fmt.Sprintf("workload %s is not on its node", w.GetName()), nil)
		case out.Ended != nil: // the first one is reported
		case got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED:
			out.Ended = ended(commonv1.Reason_REASON_WORKLOAD_FAILED,
				fmt.Sprintf("workload %s ended before it was ready: %s", w.GetName(), endText(got)), got)
		case exitedItself(got) && (restarts > limit || restarts == limit && down(got)):
			out.Ended = ended(commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP,
				fmt.Sprintf("workload %s was restarted %s before it was ready: %s", w.GetName(), times(restarts), endText(got)),
				got)
		default:
			out.Why = fmt.Sprintf("workload %s is not ready: %s", w.GetName(),
				strings.TrimPrefix(got.GetDetail(), "not ready: "))
			if restarts > 0 {
				out.Why += fmt.Sprintf(" (restarted %s; an exit after restart %d is a crash loop)", times(restarts), limit)
			}
		}
	}
	if out.Why == "" {
		out.Why = "waiting for the workloads to be ready"
	}
	return out
}

// exitedItself reports whether the last end of a workload is its own exit. The exit of a workload whose shim died
// before it is unknown, and a workload that its agent could not start has not run: the agent's text then gives the
// cause, not an exit.
func exitedItself(got *nodev1.WorkloadStatus) bool {
	return got.GetExitCode() >= 0 && !unstarted(got)
}

func unstarted(got *nodev1.WorkloadStatus) bool {
	return got.GetExitCode() == exitNotStarted && down(got) && got.GetDetail() != exitText(exitNotStarted)
}

// down reports whether no process of the workload runs.
func down(got *nodev1.WorkloadStatus) bool {
	return got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF ||
		got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
}

// ended returns the failure of a workload that has ended: owned by the tenant, and final, if the workload exited
// itself.
func ended(reason commonv1.Reason, text string, got *nodev1.WorkloadStatus) *saga.StepError {
	out := &saga.StepError{
		Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD, Reason: reason, Public: text,
		// The agent has cleaned the output, but the agent is not trusted, so it is cleaned again.
		LastOutput: showable.Tail(showable.Clean([]byte(got.GetLastOutput())), showable.MaxTail),
	}
	if !exitedItself(got) {
		out.Layer, out.Retryable = commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, true
	}
	return out
}

func times(n int32) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// exitNotStarted is the exit code that agents report of a workload that they could not start.
const exitNotStarted = 127

// endText returns how a workload ended, for people.
func endText(got *nodev1.WorkloadStatus) string {
	if unstarted(got) {
		return got.GetDetail()
	}
	return exitText(got.GetExitCode())
}

// exitText returns an exit code in the text that agents use.
func exitText(code int32) string {
	switch {
	case code < 0:
		return "its exit status was lost with its shim"
	case code > 128:
		return fmt.Sprintf("ended by signal %d", code-128)
	default:
		return fmt.Sprintf("exited with status %d", code)
	}
}
