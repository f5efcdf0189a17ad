package process_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/process"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// afterBoot leaves, in a directory, the workload "down" of which no process runs and the workload "up" that runs
// without a shim, and makes the agent that starts there next.
func afterBoot(t *testing.T) *rig {
	t.Helper()
	dir := host(t)
	r, err := newRuntime(dir, testkit.Logger(t), false)
	if err != nil {
		t.Fatal(err)
	}
	was := &rig{Runtime: r, t: t, ctx: testkit.Context(t), dir: dir}
	down, up := sh("down", "exec sleep 600"), sh("up", "exec sleep 600")
	down.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_ALWAYS
	st := was.deploy(down)
	kill9(t, was.shimOf("down"))
	kill9(t, int(st.GetPid()))
	was.deploy(up)
	kill9(t, was.shimOf("up"))
	return newRig(t, dir, false)
}

// untilAdopted waits until "up" has a shim again. Workloads are healed in the order of their names: "down" has been
// checked by then.
func (g *rig) untilAdopted() {
	g.t.Helper()
	g.until("up", "adopted", func(st *nodev1.WorkloadStatus) bool {
		return st.GetPhase() == phaseRunning && st.GetAdopted() && running(g.shimOf("up"))
	})
}

// A workload that runs is adopted by an agent that starts; one that does not run stays as it is until its epoch is
// listed.
func TestWhatDoesNotRunWaitsToBeListed(t *testing.T) {
	g := afterBoot(t)
	g.supervise()
	g.untilAdopted()
	if st := g.status("down"); st.GetPid() != 0 || st.GetRestarts() != 0 || running(g.shimOf("down")) {
		t.Fatalf("started before its epoch was listed: %v", st)
	}
	// The round that adopted "up" may not have come to it yet.
	g.until("down", "told as one that waits", func(now *nodev1.WorkloadStatus) bool {
		return now.GetPhase() == phaseStopped && now.GetDetail() != ""
	})
	// Lists of other epochs and other workspaces are none of its own. The killed shim of "up" shows that a round was
	// made since.
	g.SetRunList([]process.WorkspaceEpoch{{WorkspaceID: workspaceA, Epoch: 2}, {WorkspaceID: workspaceB, Epoch: 1}})
	kill9(t, g.shimOf("up"))
	g.untilAdopted()
	if st := g.status("down"); st.GetPid() != 0 || running(g.shimOf("down")) {
		t.Fatalf("started though another epoch was listed: %v", st)
	}
	g.SetRunList([]process.WorkspaceEpoch{{WorkspaceID: workspaceA, Epoch: 1}})
	g.phase("down", phaseRunning)
	// Once it runs it is brought back whether or not a later list has its epoch.
	g.SetRunList(nil)
	st := g.status("down")
	kill9(t, g.shimOf("down"))
	kill9(t, int(st.GetPid()))
	g.until("down", "brought back", func(now *nodev1.WorkloadStatus) bool {
		return now.GetPhase() == phaseRunning && now.GetPid() != st.GetPid()
	})
}

// When a control plane of an earlier version sends no list, every deployed workload is started.
func TestAnOlderControlPlaneHasEverythingStarted(t *testing.T) {
	g := afterBoot(t)
	g.supervise()
	g.SetRunAll()
	g.phase("down", phaseRunning)
}

// A task starts its workload without any list: it is signed for its epoch.
func TestATaskNeedsNoList(t *testing.T) {
	g := afterBoot(t)
	if _, err := g.Start(g.ctx, workspaceA, "down"); err != nil {
		t.Fatal(err)
	}
	g.phase("down", phaseRunning)
}

// StopAll ends every workload, those that wait to be listed included, and none is started again.
func TestStopAllStopsForGood(t *testing.T) {
	g := afterBoot(t)
	g.supervise()
	g.untilAdopted()
	up := g.status("up")
	if err := g.StopAll(g.ctx, time.Second); err != nil {
		t.Fatal(err)
	}
	if running(int(up.GetPid())) {
		t.Error("a workload runs on")
	}
	g.SetRunAll()
	// One more workload shows that a round was made since.
	g.deploy(sh("zulu", "exec sleep 600"))
	kill9(t, g.shimOf("zulu"))
	g.until(
		"zulu", "adopted", func(st *nodev1.WorkloadStatus) bool { return st.GetAdopted() && running(g.shimOf("zulu")) },
	)
	for _, name := range []string{"down", "up"} {
		if st := g.status(name); st.GetPid() != 0 || st.GetPhase() == phaseRunning {
			t.Errorf("%s was started again: %v", name, st)
		}
	}
}
