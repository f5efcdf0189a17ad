package agent_test

import (
	"errors"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestACrashLoopIsReportedOnce: an agent reports a workload that exits again and again when it enters the loop, by the
// number of restarts in the control plane's policy, and not with each restart.
func TestACrashLoopIsReportedOnce(t *testing.T) {
	testkit.IO(t)
	m := newMesh(t)
	cfg := config(passable(t))
	cfg.ObserveEvery = time.Hour // a full round reports the loop again
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_PolicyUpdate{
		PolicyUpdate: &nodev1.PolicyUpdate{Policy: &commonv1.NodePolicy{CrashLoopRestarts: 1}},
	}})
	deploy := func(workspace, script string) {
		m.request(workspace, 1, commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY,
			&nodev1.WorkloadDeploy{Workload: &nodev1.Workload{
				Name: "work", Command: []string{"/bin/sh", "-c", script},
			}})
	}
	// next returns the first observation that ok accepts, and how many of the loop's workspace came before it.
	loops, other := ids.New(), ids.New()
	next := func(what string, ok func(*nodev1.Observation) bool) (*nodev1.WorkloadStatus, int) {
		t.Helper()
		deadline := time.After(time.Minute)
		for before := 0; ; {
			select {
			case o := <-m.observed:
				if len(o.GetWorkloads()) == 1 && ok(o) {
					return o.GetWorkloads()[0], before
				}
				if o.GetWorkspaceId() == loops {
					before++
				}
			case <-deadline:
				t.Fatalf("not reported in time: %s", what)
			}
		}
	}
	deploy(loops, "exit 3")
	st, _ := next("the crash loop", func(o *nodev1.Observation) bool {
		return o.GetWorkspaceId() == loops && o.GetWorkloads()[0].GetCrashLoop()
	})
	if st.GetExitCode() != 3 || st.GetRestarts() < 1 || st.GetExitedAt() == nil {
		t.Errorf("reported as %v", st)
	}
	began := recorded(t, cfg, loops).Run
	testkit.Eventually(t, testkit.Patience, func() error {
		if recorded(t, cfg, loops).Run == began {
			return errors.New("not restarted")
		}
		return nil
	})
	// Two changes of another workspace are two more rounds in which the loop could be reported.
	deploy(other, "exec sleep 600")
	seen := func(phase nodev1.WorkloadPhase) func(*nodev1.Observation) bool {
		return func(o *nodev1.Observation) bool {
			return o.GetWorkspaceId() == other && o.GetWorkloads()[0].GetPhase() == phase
		}
	}
	_, first := next("the other", seen(nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING))
	m.request(other, 2, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP, &nodev1.WorkloadRef{Name: "work"})
	_, second := next("the end of the other", seen(nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED))
	if first+second != 0 {
		t.Errorf("the crash loop was reported %d times more", first+second)
	}
	m.request(loops, 2, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP, &nodev1.WorkloadRef{Name: "work"})
	next("the end of the loop", func(o *nodev1.Observation) bool {
		return o.GetWorkspaceId() == loops && !o.GetWorkloads()[0].GetCrashLoop() &&
			o.GetWorkloads()[0].GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	})
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
