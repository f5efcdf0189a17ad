package workspace

import (
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// provision asks for a workspace of one workload whose agent reports what the world is told to.
func (p *plane) provision(name string, crashes int32, reported *nodev1.WorkloadStatus) string {
	p.t.Helper()
	p.world.mu.Lock()
	p.world.workload, p.world.crashes, p.world.restarted = reported, crashes, 0
	p.world.mu.Unlock()
	res, err := p.seats[0].server.RequestOperation(p.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Target: &lifecyclev1.RequestOperationRequest_Create{
			Create: &lifecyclev1.CreateWorkspace{Tenant: p.tenant(), Name: name, Spec: &lifecyclev1.WorkspaceSpec{
				Placement: byProcess, Workloads: []*nodev1.Workload{{Name: "main", Command: []string{"false"}}},
			}},
		},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return res.GetOperation().GetWorkspaceId()
}

// waits returns the attempts of the wait for readiness.
func (p *plane) waits(runID string) []saga.Attempt {
	p.t.Helper()
	all, err := saga.Timeline(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), runID)
	if err != nil {
		p.t.Fatal(err)
	}
	var out []saga.Attempt
	for _, a := range all {
		if a.Name == StepReady && a.Dir == "do" {
			out = append(out, a)
		}
	}
	return out
}

// TestACrashLoopEndsTheWait: what exits again and again is the tenant's failure, found at once and not tried for another window.
func TestACrashLoopEndsTheWait(t *testing.T) {
	p := newPlane(t, planeConfig{seats: 1, lease: 15 * time.Second})
	backoff := func() *nodev1.WorkloadStatus {
		return &nodev1.WorkloadStatus{Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, ExitCode: 1, Detail: "exited with status 1", LastOutput: "no module named x"}
	}
	t.Run("third restart", func(t *testing.T) {
		p.t = t
		w := p.rests(p.provision("loop", 1000, backoff()), "failed")
		want := "workload main was restarted 3 times before it was ready: exited with status 1"
		if w.LastErrorCode != "workload_crash_loop" || w.LastError != want {
			t.Errorf("the workspace says %s: %s, want %s", w.LastErrorCode, w.LastError, want)
		}
		attempts := p.waits(w.RunID)
		if len(attempts) != 1 {
			t.Fatalf("%d attempts: a crash loop is not waited for again", len(attempts))
		}
		if a := attempts[0]; a.State != "failed" || a.ErrorLayer != "workload" || a.LastOutput != "no module named x" || a.Error != want {
			t.Errorf("the attempt is %s of layer %s with %q: %s", a.State, a.ErrorLayer, a.LastOutput, a.Error)
		}
	})
	t.Run("two restarts and then ready", func(t *testing.T) {
		p.t = t
		w := p.rests(p.provision("late", 2, backoff()), "active")
		for _, a := range p.waits(w.RunID) {
			if a.State != "succeeded" || a.LastOutput != "" {
				t.Errorf("attempt %d is %s: %s, %q", a.Attempt, a.State, a.Error, a.LastOutput)
			}
		}
	})
	t.Run("one exit of what is not restarted", func(t *testing.T) {
		p.t = t
		exited := &nodev1.WorkloadStatus{
			Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED, ExitCode: 2, Detail: "exited with status 2",
			LastOutput: "a\x1b[31mb\u202e\n" + strings.Repeat("\u00e4", 1500),
		}
		w := p.rests(p.provision("once", 0, exited), "failed")
		want := "workload main ended before it was ready: exited with status 2"
		if w.LastErrorCode != "workload_failed" || w.LastError != want {
			t.Errorf("the workspace says %s: %s, want %s", w.LastErrorCode, w.LastError, want)
		}
		attempts := p.waits(w.RunID)
		if len(attempts) != 1 || attempts[0].ErrorLayer != "workload" {
			t.Fatalf("attempts %+v", attempts)
		}
		// What an agent sends is not believed to be clean.
		if out := attempts[0].LastOutput; len(out) > 2048 || strings.ContainsAny(out, "\x1b\u202e\ufffd") || !strings.HasSuffix(out, "\u00e4") {
			t.Errorf("the attempt keeps %d bytes: %q", len(out), out)
		}
	})
}
