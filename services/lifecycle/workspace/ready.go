package workspace

import (
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/showable"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// crashLoop returns how many restarts make a crash loop by the policy in force.
func (s *Steps) crashLoop() int32 {
	set := policy.Defaults()
	if s.deps.Policy != nil {
		set = s.deps.Policy.Current()
	}
	return int32(set.WorkloadCrashLoopRestarts()) //nolint:gosec // at most 100
}

// judge counts the ready workloads, and returns what is waited for, or why the step has failed. before are the restarts of each workload at its deploy;
// with limit more of them, and not ready, it is in a crash loop. Such a failure is the tenant's, and waiting again would not mend it: it is final.
func judge(spec *lifecyclev1.WorkspaceSpec, status *nodev1.WorkloadStatusOutput, before map[string]int32, limit int32) (int, string, error) {
	byName := map[string]*nodev1.WorkloadStatus{}
	for _, w := range status.GetWorkloads() {
		byName[w.GetName()] = w
	}
	ready, why := 0, ""
	var failed error
	for _, w := range spec.GetWorkloads() {
		got := byName[w.GetName()]
		restarts := got.GetRestarts() - before[w.GetName()]
		if restarts < 0 { // it was started afresh since
			restarts = got.GetRestarts()
		}
		switch {
		case got.GetReady():
			ready++
		case got == nil || got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT:
			failed = saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, commonv1.Reason_REASON_WORKLOAD_FAILED,
				fmt.Sprintf("workload %s is not on its node", w.GetName()), nil)
		case got.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED:
			return 0, "", ended(commonv1.Reason_REASON_WORKLOAD_FAILED,
				fmt.Sprintf("workload %s ended before it was ready: %s", w.GetName(), exitText(got.GetExitCode())), got)
		case restarts >= limit:
			return 0, "", ended(commonv1.Reason_REASON_WORKLOAD_CRASH_LOOP,
				fmt.Sprintf("workload %s was restarted %s before it was ready: %s", w.GetName(), times(restarts), exitText(got.GetExitCode())), got)
		default:
			why = fmt.Sprintf("workload %s is not ready: %s", w.GetName(), got.GetDetail())
			if restarts > 0 {
				why += fmt.Sprintf(" (restarted %s; %d make a crash loop)", times(restarts), limit)
			}
		}
	}
	if why == "" {
		why = "waiting for the workloads to be ready"
	}
	if failed != nil {
		return 0, "", failed
	}
	return ready, why, nil
}

// ended is the failure of a workload that is its tenant's.
func ended(reason commonv1.Reason, text string, got *nodev1.WorkloadStatus) error {
	return &saga.StepError{
		Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD, Reason: reason, Public: text,
		// The agent has cleaned it; it is not believed.
		LastOutput: showable.Tail(showable.Clean([]byte(got.GetLastOutput())), showable.MaxTail),
	}
}

func times(n int32) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// exitText spells an exit code as agents do.
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
