package status

import (
	"fmt"
	"slices"
	"strings"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/showable"
)

// Reasons of an active workspace whose workload does not run on.
const (
	ReasonCrashLoop       = "workload_crash_loop"
	ReasonWorkloadStopped = "workload_stopped"
)

// workloadsShown is how many workloads a workspace's detail describes at most; it gives only the number of the others.
const workloadsShown = 3

// WorkloadStatus describes the workloads of an active workspace that do not run on. It is empty if all of them run on,
// or if nothing is known about them.
type WorkloadStatus struct {
	Reason     string
	Detail     string // the reason in words
	NextAction string // for the workspace's user
	Failing    bool   // one of them fails; false if all that ended have completed their work
}

// DescribeWorkloads returns the status of the workloads of a workspace that exit again and again, or have ended for
// good, from the last observation of its node's agent. An observation of another epoch does not concern this workspace,
// and a workload that its spec does not name is left out. The caller has checked that the agent can act: the last
// report of a silent agent says nothing about the present.
func DescribeWorkloads(w *lifecyclev1.Workspace, seen *nodev1.Observation) WorkloadStatus {
	if seen.GetEpoch() != w.GetEpoch() {
		return WorkloadStatus{}
	}
	var out WorkloadStatus
	var lines, done []string // workloads that fail come first, because a table may cut the end of the text
	for _, spec := range w.GetSpec().GetWorkloads() {
		at := slices.IndexFunc(seen.GetWorkloads(),
			func(st *nodev1.WorkloadStatus) bool { return st.GetName() == spec.GetName() })
		if at < 0 {
			continue
		}
		st := seen.GetWorkloads()[at]
		reason, line, failing := describeWorkload(st)
		if reason == "" {
			continue
		}
		if failing {
			lines = append(lines, line)
		} else {
			done = append(done, line)
		}
		crashes := reason == ReasonCrashLoop && out.Reason != ReasonCrashLoop
		// What failed comes before what has finished, which is under the same reason.
		fails := failing && !out.Failing && out.Reason != ReasonCrashLoop
		if out.Reason == "" || crashes || fails {
			out.Reason, out.NextAction = reason, workloadAction(w, st, reason, failing)
		}
		out.Failing = out.Failing || failing
	}
	lines = append(lines, done...)
	if more := len(lines) - workloadsShown; more > 0 {
		lines = append(lines[:workloadsShown], fmt.Sprintf("and %d more", more))
	}
	out.Detail = strings.Join(lines, "; ")
	return out
}

// describeWorkload returns why a workload does not run on, as a reason and as a line, and whether that is a failure.
// The line begins with the part that differs between workloads: of a list on a narrow terminal only its beginning is
// visible.
func describeWorkload(st *nodev1.WorkloadStatus) (string, string, bool) {
	last, when := lastExit(st), ""
	if at := st.GetExitedAt(); at != nil {
		when = " at " + at.AsTime().UTC().Format(time.RFC3339)
	}
	last += when
	name, restarts := st.GetName(), fmt.Sprintf("%d restarts", st.GetRestarts())
	if st.GetRestarts() == 1 {
		restarts = "1 restart"
	}
	exited := st.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	switch {
	case st.GetCrashLoop() && unstarted(st):
		return ReasonCrashLoop, fmt.Sprintf("cannot be started: %s, %s", name, last), true
	case st.GetCrashLoop():
		return ReasonCrashLoop, fmt.Sprintf("crash loop: %s, %s, %s", name, restarts, last), true
	case exited && st.GetExitCode() == 0:
		return ReasonWorkloadStopped, "finished: " + name + when, false
	case exited && st.GetRestarts() == 0:
		return ReasonWorkloadStopped, fmt.Sprintf("ended: %s, %s", name, last), true
	case exited:
		return ReasonWorkloadStopped, fmt.Sprintf("ended: %s, %s, after %s", name, last, restarts), true
	default:
		return "", "", false
	}
}

// exitNotStarted is the exit code that agents report of a workload that they could not start.
const exitNotStarted = 127

// unstarted reports whether the agent could not start the workload: it then describes why in other words than those of
// an exit.
func unstarted(st *nodev1.WorkloadStatus) bool {
	return st.GetExitCode() == exitNotStarted && st.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF &&
		st.GetDetail() != "" && !strings.HasPrefix(st.GetDetail(), "exited ")
}

// lastExit returns a text about how a workload last ended.
func lastExit(st *nodev1.WorkloadStatus) string {
	const detailShown = 200
	switch code := st.GetExitCode(); {
	case unstarted(st):
		// the agent's text may contain control characters
		return showable.Tail(showable.Clean([]byte(st.GetDetail())), detailShown)
	case code < 0:
		return "its exit status was lost with its shim"
	case code > 128:
		return fmt.Sprintf("was ended by signal %d", code-128)
	default:
		return fmt.Sprintf("exited with status %d", code)
	}
}

// workloadAction returns what the user of a workspace should do about a workload that does not run on.
func workloadAction(w *lifecyclev1.Workspace, st *nodev1.WorkloadStatus, reason string, failing bool) string {
	logs := fmt.Sprintf("gpuaas workspaces logs %s/%s --workload %s", w.GetTenant(), w.GetName(), st.GetName())
	switch {
	case reason == ReasonCrashLoop:
		return fmt.Sprintf("read its last output with `%s --previous`, and correct what it depends on, or create the "+
			"workspace anew with another command, "+
			"image or environment; the agent goes on restarting it", logs)
	case failing:
		return fmt.Sprintf("read its last output with `%s`, correct what it depends on, and recreate the workspace", logs)
	default:
		return fmt.Sprintf("none: it did what it was asked to; read its output with `%s`, and decommission the workspace "+
			"when it is not needed any more", logs)
	}
}
