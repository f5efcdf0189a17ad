package process_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent/runtime/process"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestWhatExitsSoonIsNeverReady: a workload without a probe that exits a moment after its start is not ready at any
// time, however often its status is read.
func TestWhatExitsSoonIsNeverReady(t *testing.T) {
	g := newRig(t, host(t), false)
	soon := sh("soon", "sleep 0.3; exit 3")
	// on a machine that is paused it may run for longer than its command says
	soon.Readiness = &nodev1.Readiness{MinUptime: durationpb.New(5 * time.Minute)}
	if st := g.deploy(soon); st.GetReady() {
		t.Errorf("ready at its start: %v", st)
	}
	st := g.until("soon", "restarted twice", func(st *nodev1.WorkloadStatus) bool {
		if st.GetReady() {
			t.Fatalf("ready: %v", st)
		}
		if st.GetPhase() == phaseRunning && !strings.Contains(st.GetDetail(), "of the 300 s that make it ready") {
			t.Fatalf("it runs, and the detail is %q", st.GetDetail())
		}
		return st.GetRestarts() >= 2
	})
	if st.GetExitCode() != 3 {
		t.Errorf("status %v", st)
	}
}

// TestLeastUptime: a workload is ready once it has run for as long as its spec asks, by default two seconds if it has
// no probe; with a probe only the probe decides by default.
func TestLeastUptime(t *testing.T) {
	g := newRig(t, host(t), false)
	steady := sh("steady", "exec sleep 600")
	begun := time.Now()
	if st := g.deploy(steady); st.GetReady() && time.Since(begun) < 2*time.Second || st.GetPhase() != phaseRunning {
		t.Errorf("at its start: %v", st)
	}
	if st := g.until("steady", "ready", (*nodev1.WorkloadStatus).GetReady); time.Since(begun) < 2*time.Second ||
		st.GetDetail() != "" {
		t.Errorf("ready after %s: %v", time.Since(begun), st)
	}
	at := sh("at-once", "exec sleep 600")
	at.Readiness = &nodev1.Readiness{MinUptime: durationpb.New(0)}
	if st := g.deploy(at); !st.GetReady() {
		t.Errorf("zero is asked for: %v", st)
	}
	long := sh("long", "exec sleep 600")
	long.Readiness = &nodev1.Readiness{MinUptime: durationpb.New(5 * time.Minute)}
	if st := g.deploy(long); st.GetReady() || !strings.Contains(st.GetDetail(), "of the 300 s that make it ready") {
		t.Errorf("five minutes are asked for: %v", st)
	}
	web := demo("web")
	web.Readiness.MinUptime = durationpb.New(5 * time.Minute)
	if st := g.deploy(web); st.GetReady() || !strings.Contains(st.GetDetail(), "of the 300 s that make it ready") {
		t.Errorf("a probe, and five minutes: %v", st)
	}
	for _, bad := range []time.Duration{-time.Second, 5*time.Minute + time.Second} {
		w := sh("bad", "exec sleep 600")
		w.Readiness = &nodev1.Readiness{MinUptime: durationpb.New(bad)}
		_, err := g.Deploy(g.ctx, process.Request{
			WorkspaceID: workspaceA, Epoch: 1,
			Deploy: &nodev1.WorkloadDeploy{Workload: w},
		})
		if err == nil || !strings.Contains(err.Error(), "least uptime") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestAJobThatIsDoneIsReady: a workload that exits with status 0 after its least uptime is ready, also if its status is
// first read after its end. One that fails, or ends before its least uptime, is not.
func TestAJobThatIsDoneIsReady(t *testing.T) {
	g := newRig(t, host(t), false)
	for name, c := range map[string]struct {
		script string
		least  time.Duration
		ready  bool
	}{
		"done":   {"exit 0", 0, true},
		"failed": {"exit 4", 0, false},
		"early":  {"exit 0", 5 * time.Minute, false},
	} {
		w := sh(name, c.script)
		w.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER
		w.Readiness = &nodev1.Readiness{MinUptime: durationpb.New(c.least)}
		g.deploy(w)
		st := g.until(name, "ended", func(st *nodev1.WorkloadStatus) bool {
			return st.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
		})
		if st.GetReady() != c.ready {
			t.Errorf("%s: %v", name, st)
		}
	}
}

// TestUptimeOutlivesTheAgent: an agent that starts beside a running workload determines since when it runs.
func TestUptimeOutlivesTheAgent(t *testing.T) {
	dir := host(t)
	agent, pid := agentProcess(t, dir, sh("steady", "exec sleep 600"))
	kill9(t, agent.Process.Pid)
	_ = agent.Wait()
	g := newRig(t, dir, false)
	st := g.until("steady", "ready", (*nodev1.WorkloadStatus).GetReady)
	if int(st.GetPid()) != pid || st.GetRestarts() != 0 {
		t.Errorf("status %v, want pid %d", st, pid)
	}
	// The agent keeps none of it in memory: the next one reports the same at once.
	next, err := newRuntime(dir, testkit.Logger(t), false)
	if err != nil {
		t.Fatal(err)
	}
	all, err := next.Status(g.ctx, workspaceA, "steady")
	if err != nil || len(all) != 1 || !all[0].GetReady() {
		t.Errorf("%v, %v", all, err)
	}
}

// TestACrashLoopIsOneChange: a workload that exits again and again after it was ready enters a crash loop once and
// leaves it once, by a run that lasts. The restarts in between are no changes.
func TestACrashLoopIsOneChange(t *testing.T) {
	g := newRig(t, host(t), false)
	g.SetCrashLoopRestarts(2)
	g.deploy(sh("loop", "[ -e mended ] && exec sleep 600; while [ ! -e broken ]; do sleep 0.02; done; exit 3"))
	g.until("loop", "ready", (*nodev1.WorkloadStatus).GetReady)
	if !g.ObserveChanges(g.ctx) || g.ObserveChanges(g.ctx) {
		t.Fatal("a workload that became ready is not one change")
	}
	g.touch("loop", "broken")
	st := g.until("loop", "in a crash loop", (*nodev1.WorkloadStatus).GetCrashLoop)
	if st.GetExitCode() != 3 || st.GetRestarts() < 2 || st.GetExitedAt() == nil {
		t.Errorf("status %v", st)
	}
	if !g.ObserveChanges(g.ctx) {
		t.Error("a crash loop is no change")
	}
	entered := st.GetRestarts()
	g.until("loop", "restarted four times more", func(st *nodev1.WorkloadStatus) bool {
		if !st.GetCrashLoop() || g.ObserveChanges(g.ctx) {
			t.Fatalf("a restart in a crash loop is a change: %v", st)
		}
		return st.GetRestarts() >= entered+4
	})
	g.touch("loop", "mended")
	st = g.until("loop", "out of the crash loop", func(st *nodev1.WorkloadStatus) bool { return !st.GetCrashLoop() })
	if !st.GetReady() || st.GetPhase() != phaseRunning {
		t.Errorf("out of the crash loop: %v", st)
	}
	if !g.ObserveChanges(g.ctx) || g.ObserveChanges(g.ctx) {
		t.Error("the end of a crash loop is not one change")
	}
	// A start by a task begins a new count.
	if st, err := g.Restart(g.ctx, workspaceA, "loop", time.Second); err != nil || st.GetCrashLoop() ||
		st.GetRestarts() != 0 {
		t.Errorf("%v, %v", st, err)
	}
}
