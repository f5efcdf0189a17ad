package readiness

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// TestReadiness checks that restarts since the deploy count, and that failures of the tenant's workload are owned by
// the tenant.
func TestReadiness(t *testing.T) {
	const running, backoff, exited = nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING,
		nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	const tenant, mesh = commonv1.OwnerLayer_OWNER_LAYER_WORKLOAD, commonv1.OwnerLayer_OWNER_LAYER_RUNTIME
	spec := &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}}}
	for name, tc := range map[string]struct {
		phase    nodev1.WorkloadPhase
		restarts int32
		before   int32
		code     int32
		detail   string
		layer    commonv1.OwnerLayer // unspecified: the step waits
		text     string
	}{
		"runs, and not for long enough": {
			phase: running, detail: "has run for 0.4 s of the 2 s that make it ready",
			text: "workload main is not ready: has run for 0.4 s of the 2 s that make it ready",
		},
		"two restarts, down": {phase: backoff, restarts: 2, code: 1, text: "(restarted 2 times; an exit " +
			"after restart 3 is a crash loop)"},
		"the third restart runs": {phase: running, restarts: 3, code: 1, text: "(restarted 3 times; an exit " +
			"after restart 3 is a crash loop)"},
		"the third restart exited": {phase: backoff, restarts: 3, code: 1, layer: tenant, text: "workload main " +
			"was restarted 3 times before it was ready: exited with status 1"},
		"the fourth restart runs": {
			phase: running, restarts: 4, code: 1, layer: tenant, text: "restarted 4 times",
		},
		"three of before the deploy": {phase: backoff, restarts: 5, before: 3, code: 1, text: "restarted 2 times"},
		"three, and its shim died": {
			phase: backoff, restarts: 3, code: -1, detail: "its exit status was lost with its shim", text: "lost with its shim",
		},
		"three, and it was not started": {
			phase: backoff, restarts: 3, code: 127, detail: "no room", text: "is not ready: no room",
		},
		"three of what is not in PATH": {
			phase: backoff, restarts: 3, code: 127, detail: "exited with status 127", layer: tenant, text: "exited with " +
				"status 127",
		},
		"the agent says that it is not ready": {
			phase: running, detail: "not ready: connection refused", text: "workload main is not ready: connection refused",
		},
		"ended": {phase: exited, code: 2, layer: tenant, text: "workload main ended before " +
			"it was ready: exited with status 2"},
		"ended, and its shim died": {
			phase: exited, code: -1, layer: mesh, text: "its exit status was lost with its shim",
		},
		"never started by its agent": {
			phase: exited, code: 127, detail: "prepare start: no room", layer: mesh, text: "ended before it was ready: " +
				"prepare start: no room",
		},
		"ended with a status of its own 127": {
			phase: exited, code: 127, detail: "exited with status 127", layer: tenant, text: "exited with status 127",
		},
	} {
		got := Of(spec, &nodev1.WorkloadStatusOutput{Workloads: []*nodev1.WorkloadStatus{
			{Name: "main", Phase: tc.phase, Restarts: tc.restarts, ExitCode: tc.code, Detail: tc.detail},
		}}, map[string]int32{"main": tc.before}, 3)
		text, layer, retryable := got.Why, commonv1.OwnerLayer_OWNER_LAYER_UNSPECIFIED, false
		if got.Ended != nil {
			text, layer, retryable = got.Ended.Public, got.Ended.Layer, got.Ended.Retryable
		}
		if layer != tc.layer || retryable != (tc.layer == mesh) || !strings.Contains(text, tc.text) {
			t.Errorf("%s: %v, retryable %v: %s", name, layer, retryable, text)
		}
	}
}
