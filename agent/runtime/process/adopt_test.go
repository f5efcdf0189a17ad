package process_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/runtime/process"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A workload outlives an agent that is killed: the next agent finds it, and can stop it.
func TestAgentIsKilled(t *testing.T) {
	dir := host(t)
	agent, pid := agentProcess(t, dir, demo("web"))
	kill9(t, agent.Process.Pid)
	_ = agent.Wait()
	if !running(pid) {
		t.Fatal("the workload died with its agent")
	}
	g := newRig(t, dir, false)
	st := g.until("web", "ready", (*nodev1.WorkloadStatus).GetReady)
	if st.GetPid() != int32(pid) || !st.GetAdopted() || st.GetRestarts() != 0 {
		t.Fatalf("adopted: %v, want pid %d", st, pid)
	}
	same := g.deploy(demo("web"))
	if same.GetPid() != int32(pid) {
		t.Errorf("deploying the same again: %v", same)
	}
	if _, err := g.Stop(g.ctx, workspaceA, "web", time.Second); err != nil || running(pid) {
		t.Errorf("stop: %v; runs: %t", err, running(pid))
	}
}

// A workload that ends while no agent runs is restarted by its shim, and its exit status is kept.
func TestWorkloadEndsWithoutAgent(t *testing.T) {
	dir := host(t)
	keep := sh("again", "echo up; exec sleep 600")
	keep.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_ALWAYS
	agent, pid := agentProcess(t, dir, keep)
	kill9(t, agent.Process.Pid)
	_ = agent.Wait()
	kill9(t, pid)
	g := newRig(t, dir, false)
	st := g.until("again", "running anew", func(st *nodev1.WorkloadStatus) bool {
		return st.GetPhase() == phaseRunning && st.GetPid() != int32(pid)
	})
	if st.GetRestarts() != 1 {
		t.Errorf("restarts %d", st.GetRestarts())
	}
}

func TestExitStatusIsKeptWithoutAgent(t *testing.T) {
	dir := host(t)
	once := sh("once", "while [ ! -e go ]; do sleep 0.02; done; exit 42")
	once.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER
	agent, pid := agentProcess(t, dir, once)
	kill9(t, agent.Process.Pid)
	_ = agent.Wait()
	if err := os.WriteFile(filepath.Join(dir, "open", "work", workspaceA, "once", "go"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	goneSoon(t, pid)
	g := newRig(t, dir, false)
	if st := g.phase("once", phaseExited); st.GetExitCode() != 42 {
		t.Errorf("status %v", st)
	}
	stop := g.supervise()
	testkit.Eventually(t, testkit.Patience, func() error {
		select {
		case <-g.Changed():
			return nil
		default:
			return errors.New("no change was told")
		}
	})
	stop()
	if st := g.status("once"); st.GetPhase() != phaseExited || st.GetExitCode() != 42 {
		t.Errorf("a supervisor started it again: %v", st)
	}
}

// A workload outlives a shim that is killed as well: a new shim adopts the process, and still ends it with all
// processes that it started.
func TestShimIsKilled(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		st := g.deploy(sh("orphan", "setsid sleep 600 & echo child=$!; exec sleep 601"))
		g.output("orphan", "child=")
		shim := g.shimOf("orphan")
		kill9(t, shim)
		if !running(int(st.GetPid())) {
			t.Fatal("the workload died with its shim")
		}
		g.supervise()
		testkit.Eventually(t, testkit.Patience, func() error {
			if next := g.shimOf("orphan"); next == shim || !running(next) {
				return errors.New("no new shim")
			}
			return nil
		})
		now := g.phase("orphan", phaseRunning)
		if now.GetPid() != st.GetPid() || !now.GetAdopted() || now.GetRestarts() != 0 {
			t.Fatalf("status %v, want pid %d adopted", now, st.GetPid())
		}
		// The shim notices its end, although no parent can wait for it, and counts it as a failure.
		kill9(t, int(st.GetPid()))
		after := g.until("orphan", "restarted",
			func(st *nodev1.WorkloadStatus) bool { return st.GetRestarts() == 1 && st.GetPhase() == phaseRunning })
		if after.GetPid() == st.GetPid() {
			t.Errorf("status %v", after)
		}
		_, text, _ := strings.Cut(g.file("orphan", "previous.log"), "child=")
		first, _, _ := strings.Cut(text, "\n")
		child, err := strconv.Atoi(first)
		if err != nil || running(child) {
			t.Errorf("a descendant of the former run is left: %d (%v)", child, err)
		}
	})
}

// Shim and workload both die while no agent runs: the policy decides, and a job that is never restarted stays ended
// with an unknown status.
func TestShimAndWorkloadAreKilled(t *testing.T) {
	g := newRig(t, host(t), false)
	never, always := sh("never", "exec sleep 600"), sh("always", "exec sleep 600")
	never.RestartPolicy, always.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER,
		nodev1.RestartPolicy_RESTART_POLICY_ALWAYS
	for _, w := range []*nodev1.Workload{never, always} {
		st := g.deploy(w)
		kill9(t, g.shimOf(w.GetName()))
		kill9(t, int(st.GetPid()))
	}
	g.supervise()
	if st := g.phase("never", phaseExited); st.GetExitCode() != -1 {
		t.Errorf("never: %v", st)
	}
	if st := g.phase("always", phaseRunning); st.GetRestarts() != 1 {
		t.Errorf("always: %v", st)
	}
}

// A shim that gets SIGTERM at the host's shutdown ends its workload, and the next agent brings both back, whatever the
// exit status was.
func TestHostGoesDown(t *testing.T) {
	g := newRig(t, host(t), false)
	st := g.deploy(sh("service", `trap "exit 0" TERM; echo up; while :; do sleep 0.05; done`))
	g.output("service", "up")
	if err := syscall.Kill(g.shimOf("service"), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	goneSoon(t, int(st.GetPid()))
	g.supervise()
	if now := g.phase("service", phaseRunning); now.GetPid() == st.GetPid() {
		t.Errorf("status %v", now)
	}
}

// A recycled pid is not the workload: the start time distinguishes the recorded process from another one, which is left
// alone.
func TestRecycledPID(t *testing.T) {
	g := newRig(t, host(t), false)
	w := sh("victim", "exec sleep 600")
	w.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER
	st := g.deploy(w)
	kill9(t, g.shimOf("victim"))
	kill9(t, int(st.GetPid()))
	// Another process has the workload's pid, by the record, and another start time.
	innocent := g.deploy(sh("innocent", "exec sleep 600"))
	path := filepath.Join(g.dir, "state", workspaceA, "victim", "state.json")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	forged := strings.Replace(string(data), `"child":{"pid":`+strconv.Itoa(int(st.GetPid())),
		`"child":{"pid":`+strconv.Itoa(int(innocent.GetPid())), 1)
	forged = strings.Replace(forged, `"shim":{"pid":`, `"shim":{"pid":`+strconv.Itoa(os.Getpid())+`,"was":`, 1)
	if forged == string(data) {
		t.Fatal("the record was not changed")
	}
	if err := os.WriteFile(path, []byte(forged), 0o600); err != nil {
		t.Fatal(err)
	}
	if now := g.status("victim"); now.GetPhase() == phaseRunning || now.GetPid() != 0 {
		t.Errorf("taken for the workload: %v", now)
	}
	g.supervise()
	g.phase("victim", phaseExited)
	if _, err := g.Stop(g.ctx, workspaceA, "victim", time.Second); err != nil {
		t.Fatal(err)
	}
	if !running(int(innocent.GetPid())) {
		t.Error("the innocent process was ended")
	}
}

// A stop that is cut short by the agent's death is finished by the next agent.
func TestStopIsFinishedByTheNextAgent(t *testing.T) {
	g := newRig(t, host(t), false)
	st := g.deploy(sh("half", "exec sleep 600"))
	kill9(t, g.shimOf("half"))
	if err := os.WriteFile(filepath.Join(g.dir, "state", workspaceA, "half", "desired.json"), []byte(`{"run":false}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	next, err := newRuntime(g.dir, testkit.Logger(t), false)
	if err != nil {
		t.Fatal(err)
	}
	(&rig{Runtime: next, t: t, ctx: g.ctx, dir: g.dir}).supervise()
	goneSoon(t, int(st.GetPid()))
}

// Two shims never supervise one workload.
func TestOneShimAtATime(t *testing.T) {
	g := newRig(t, host(t), false)
	g.deploy(sh("one", "exec sleep 600"))
	if code := process.ShimMain([]string{filepath.Join(g.dir, "state", workspaceA, "one")}); code != 75 {
		t.Errorf("a second shim ended with %d, want 75", code)
	}
	if code := process.ShimMain(nil); code != 64 {
		t.Errorf("a shim without a directory ended with %d", code)
	}
}
