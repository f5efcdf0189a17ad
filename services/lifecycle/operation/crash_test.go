package operation

import (
	"fmt"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// provision requests a workspace of one workload whose agent reports the given status.
func (p *cluster) provision(name string, crashes int32, reported *nodev1.WorkloadStatus) string {
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
func (p *cluster) waits(runID string) []runs.Attempt {
	p.t.Helper()
	all, err := runs.Timeline(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), runID)
	if err != nil {
		p.t.Fatal(err)
	}
	var out []runs.Attempt
	for _, a := range all {
		if a.Name == provision.StepReady && a.Dir == "do" {
			out = append(out, a)
		}
	}
	return out
}

// TestACrashLoopEndsTheWait: a workload that exits again and again is the tenant's failure, which is found at once and
// not tried for another window.
func TestACrashLoopEndsTheWait(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	backoff := func() *nodev1.WorkloadStatus {
		return &nodev1.WorkloadStatus{
			Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, ExitCode: 1,
			Detail: "exited with status 1", LastOutput: "no module named x",
		}
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
		if a := attempts[0]; a.State != "failed" || a.ErrorLayer != "workload" || a.LastOutput != "no module named x" ||
			a.Error != want {
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
		// The output that an agent sends is cleaned again.
		if out := attempts[0].LastOutput; len(out) > 2048 || strings.ContainsAny(out, "\x1b\u202e\ufffd") ||
			!strings.HasSuffix(out, "\u00e4") {
			t.Errorf("the attempt keeps %d bytes: %q", len(out), out)
		}
	})
}

// TestARecreationOutlivesACrashLoop: the undo of a recreation would remove storage, and the services that the workload
// depends on may still be starting.
func TestARecreationOutlivesACrashLoop(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	for name, tc := range map[string]struct {
		crashes  int32
		reported *nodev1.WorkloadStatus
		code     string
		text     string
	}{
		"loop": {
			crashes: 1000, code: "workload_crash_loop", text: "workload main exits again and again: restarted ",
			reported: &nodev1.WorkloadStatus{
				Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF, ExitCode: 1,
				Detail: "exited with status 1", LastOutput: "no database",
			},
		},
		"once": {
			code: "workload_failed", text: "workload main ended before it was ready: exited with status 1",
			reported: &nodev1.WorkloadStatus{
				Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED, ExitCode: 1,
				Detail: "exited with status 1", LastOutput: "no database",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			id := p.rests(p.provision(name, 0, nil), "active").ID
			p.world.mu.Lock()
			p.world.workload, p.world.crashes, p.world.restarted = tc.reported, tc.crashes, 3 // 4 with the first report
			p.world.mu.Unlock()
			op, err := p.seats[0].ask(t.Context(), kRecreate, id)
			if err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, testkit.Patience, func() error {
				attempts := p.waits(op.GetOperationId())
				if len(attempts) != 1 {
					return fmt.Errorf("%d attempts", len(attempts))
				}
				a := attempts[0]
				if a.ErrorCode != tc.code || a.ErrorLayer != "workload" || !strings.HasPrefix(a.Error, tc.text) ||
					a.LastOutput != "no database" {
					return fmt.Errorf("the attempt is %s (%s): %s %s: %s, %q", a.State, a.WhyWaiting, a.ErrorLayer, a.ErrorCode,
						a.Error, a.LastOutput)
				}
				return nil
			})
			// The step probes again and again, and nothing is undone.
			var before, now int
			probes := `SELECT count(*) FROM lifecycle.task
				WHERE run_id = $1 AND type = 'workload.status' AND state = 'succeeded'`
			before = p.count(probes, op.GetOperationId())
			testkit.Eventually(t, testkit.Patience, func() error {
				if now = p.count(probes, op.GetOperationId()); now < before+2 {
					return fmt.Errorf("%d probes, then %d", before, now)
				}
				return nil
			})
			if w := p.workspace(id); w.State != "recreating" {
				t.Fatalf("the workspace is %s: %s", w.State, w.LastError)
			}
			p.world.mu.Lock()
			p.world.workload = nil
			p.world.mu.Unlock()
			w := p.rests(id, "active")
			if attempts := p.waits(w.RunID); len(attempts) != 1 || attempts[0].State != "succeeded" || attempts[0].Error != "" ||
				attempts[0].LastOutput != "" {
				t.Errorf("at the end %+v", attempts)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim WHERE workspace_id = $1 AND kind = 'schema'`,
				id); n != 1 {
				t.Errorf("%d claims of schemas: it was made anew", n)
			}
		})
	}
}
