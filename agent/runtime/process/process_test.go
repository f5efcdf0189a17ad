package process_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	phaseRunning = nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING
	phaseBackoff = nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
	phaseStopped = nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	phaseExited  = nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	phaseAbsent  = nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT
)

func demo(name string) *nodev1.Workload {
	return &nodev1.Workload{
		Name: name, Command: []string{process.DemoCommand}, Ports: []*nodev1.Port{{Name: "http"}},
		Readiness: &nodev1.Readiness{HttpPath: "/healthz", Timeout: durationpb.New(2 * time.Second)},
	}
}

// Every case runs as the host allows, and once more as a host without root and without control groups would have it.
func eachHost(t *testing.T, f func(t *testing.T, g *rig)) {
	t.Helper()
	for _, bare := range []bool{false, true} {
		t.Run(map[bool]string{false: "host", true: "bare"}[bare], func(t *testing.T) {
			f(t, newRig(t, host(t), bare))
		})
	}
}

func TestDemoServesAndStops(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		g.deploy(demo("web"))
		st := g.until("web", "ready", (*nodev1.WorkloadStatus).GetReady)
		if st.GetPhase() != phaseRunning || st.GetPid() == 0 || len(st.GetPorts()) != 1 || st.GetPorts()[0].GetPort() == 0 {
			t.Fatalf("status %v", st)
		}
		resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", st.GetPorts()[0].GetPort()))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		var said struct {
			UID  int    `json:"uid"`
			PID  int32  `json:"pid"`
			GPUs string `json:"gpus"`
		}
		if err := json.NewDecoder(resp.Body).Decode(&said); err != nil {
			t.Fatal(err)
		}
		if said.PID != st.GetPid() || said.UID != int(st.GetUid()) {
			t.Errorf("workload says %+v, status %v", said, st)
		}
		stopped, err := g.Stop(g.ctx, workspaceA, "web", testkit.Patience)
		if err != nil {
			t.Fatal(err)
		}
		if stopped.GetPhase() != phaseStopped || stopped.GetExitCode() != 0 || running(int(st.GetPid())) {
			t.Errorf("stopped: %v", stopped)
		}
		again, err := g.Start(g.ctx, workspaceA, "web")
		if err != nil {
			t.Fatal(err)
		}
		if again.GetPid() == st.GetPid() || again.GetPorts()[0].GetPort() != st.GetPorts()[0].GetPort() {
			t.Errorf("started again: %v, before: %v", again, st)
		}
	})
}

func TestDeployIsIdempotentAndReplaces(t *testing.T) {
	g := newRig(t, host(t), false)
	first := g.deploy(sh("job", "exec sleep 600"))
	second := g.deploy(sh("job", "exec sleep 600"))
	if second.GetPid() != first.GetPid() || !second.GetAdopted() {
		t.Errorf("the same again: %v, before %v", second, first)
	}
	third := g.deploy(sh("job", "exec sleep 601"))
	if third.GetPid() == first.GetPid() || running(int(first.GetPid())) {
		t.Errorf("another spec: %v", third)
	}
	higher, err := g.Deploy(g.ctx,
		process.Request{
			WorkspaceID: workspaceA, Epoch: 2,
			Deploy: &nodev1.WorkloadDeploy{Workload: sh("job", "exec sleep 601")},
		})
	if err != nil || higher.GetEpoch() != 2 || higher.GetPid() == third.GetPid() {
		t.Errorf("higher epoch: %v, %v", higher, err)
	}
	_, err = g.Deploy(g.ctx, process.Request{
		WorkspaceID: workspaceA, Epoch: 1,
		Deploy: &nodev1.WorkloadDeploy{Workload: sh("job", "exec sleep 600")},
	})
	if !fault.Has(err, commonv1.Reason_REASON_TASK_SUPERSEDED) {
		t.Errorf("lower epoch: %v", err)
	}
	if !running(int(higher.GetPid())) {
		t.Error("a refused deploy ended what runs")
	}
}

func TestExitStatusAndPolicy(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		tests := []struct {
			name, script string
			policy       nodev1.RestartPolicy
			code         int32
			phase        nodev1.WorkloadPhase
			restarts     bool
		}{
			{"never-ok", "exit 0", nodev1.RestartPolicy_RESTART_POLICY_NEVER, 0, phaseExited, false},
			{"never-3", "exit 3", nodev1.RestartPolicy_RESTART_POLICY_NEVER, 3, phaseExited, false},
			{"never-signal", "kill -9 $$", nodev1.RestartPolicy_RESTART_POLICY_NEVER, 137, phaseExited, false},
			{"failure-ok", "exit 0", nodev1.RestartPolicy_RESTART_POLICY_ON_FAILURE, 0, phaseExited, false},
			{"default-ok", "exit 0", nodev1.RestartPolicy_RESTART_POLICY_UNSPECIFIED, 0, phaseExited, false},
			{"failure-5", "exit 5", nodev1.RestartPolicy_RESTART_POLICY_ON_FAILURE, 5, phaseBackoff, true},
			{"always-ok", "exit 0", nodev1.RestartPolicy_RESTART_POLICY_ALWAYS, 0, phaseBackoff, true},
		}
		for _, tt := range tests {
			w := sh(tt.name, tt.script)
			w.RestartPolicy = tt.policy
			g.deploy(w)
		}
		for _, tt := range tests {
			st := g.until(tt.name, "as its policy says", func(st *nodev1.WorkloadStatus) bool {
				return st.GetPhase() == tt.phase && (!tt.restarts || st.GetRestarts() >= 3)
			})
			if st.GetExitCode() != tt.code {
				t.Errorf("%s: exit code %d, want %d", tt.name, st.GetExitCode(), tt.code)
			}
			if !tt.restarts && st.GetRestarts() != 0 {
				t.Errorf("%s: %d restarts", tt.name, st.GetRestarts())
			}
		}
	})
}

func TestCommandThatCannotRun(t *testing.T) {
	g := newRig(t, host(t), false)
	for name, command := range map[string][]string{
		"absent": {"/nonexistent/program"}, "no-path": {"no-such-program-anywhere"}, "no-program": {"/etc/passwd"},
	} {
		_, err := g.Deploy(g.ctx, process.Request{WorkspaceID: workspaceA, Epoch: 1, Deploy: &nodev1.WorkloadDeploy{
			Workload: &nodev1.Workload{Name: name, Command: command},
		}})
		if !fault.Has(err, commonv1.Reason_REASON_WORKLOAD_FAILED) || !strings.Contains(err.Error(), command[0]) {
			t.Errorf("%s: %v", name, err)
		}
		if st := g.phase(name, phaseExited); st.GetExitCode() != 127 {
			t.Errorf("%s: %v", name, st)
		}
	}
}

func TestRefusedSpecs(t *testing.T) {
	g := newRig(t, host(t), false)
	good := func() *nodev1.WorkloadDeploy { return &nodev1.WorkloadDeploy{Workload: sh("x", "exit 0")} }
	tests := []struct {
		name   string
		ws     string
		change func(d *nodev1.WorkloadDeploy)
		want   commonv1.Reason
	}{
		{
			name: "image only", change: func(d *nodev1.WorkloadDeploy) { d.Workload.Command, d.Workload.Image = nil, "nginx" },
			want: commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
		},
		{name: "nothing", change: func(d *nodev1.WorkloadDeploy) { d.Workload.Command = nil }},
		{name: "name climbs", change: func(d *nodev1.WorkloadDeploy) { d.Workload.Name = "../x" }},
		{name: "workspace climbs", ws: "../../../../../../../../../etc/passwd", change: func(*nodev1.WorkloadDeploy) {}},
		{name: "NUL in argument", change: func(d *nodev1.WorkloadDeploy) { d.Workload.Args = []string{"a\x00b"} }},
		{name: "loader variable", change: func(d *nodev1.WorkloadDeploy) {
			d.Workload.Env = map[string]string{"LD_PRELOAD": "/x.so"}
		}},
		{name: "own devices", change: func(d *nodev1.WorkloadDeploy) {
			d.SecretEnv = map[string]string{"CUDA_VISIBLE_DEVICES": "0"}
		}},
		{
			name:   "variable with equals",
			change: func(d *nodev1.WorkloadDeploy) { d.Workload.Env = map[string]string{"A=B": "1"} },
		},
		{name: "sealed variable", change: func(d *nodev1.WorkloadDeploy) {
			d.Workload.SealedEnv = map[string][]byte{"A": {1}}
		}},
		{name: "sealed credential", change: func(d *nodev1.WorkloadDeploy) {
			d.SealedSecretEnv = map[string][]byte{"A": {1}}
		}},
		{name: "device with comma", change: func(d *nodev1.WorkloadDeploy) { d.GpuDeviceIds = []string{"0,1"} }},
		{
			name:   "readiness without port",
			change: func(d *nodev1.WorkloadDeploy) { d.Workload.Readiness = &nodev1.Readiness{Tcp: true} },
		},
		{name: "readiness at another port", change: func(d *nodev1.WorkloadDeploy) {
			d.Workload.Ports = []*nodev1.Port{{Name: "a"}}
			d.Workload.Readiness = &nodev1.Readiness{Tcp: true, Port: "b"}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := good()
			tt.change(d)
			ws, want := tt.ws, tt.want
			if ws == "" {
				ws = workspaceA
			}
			if want == 0 {
				want = commonv1.Reason_REASON_INVALID_ARGUMENT
			}
			if _, err := g.Deploy(g.ctx, process.Request{WorkspaceID: ws, Epoch: 1, Deploy: d}); !fault.Has(err, want) {
				t.Errorf("error %v, want %v", err, want)
			}
		})
	}
}

func TestEnvironment(t *testing.T) {
	g := newRig(t, host(t), false)
	t.Setenv("AGENT_SECRET_OF_OUR_OWN", "x")
	st, err := g.Deploy(g.ctx, process.Request{WorkspaceID: workspaceA, Epoch: 7, Deploy: &nodev1.WorkloadDeploy{
		Workload: &nodev1.Workload{
			Name: "env", Command: []string{"sh", "-c", "env; echo cwd=$PWD args=$0,$1; exec sleep 600"},
			Args: []string{"a b", "$HOME;ls"}, Env: map[string]string{"PLAIN": "1"},
			Ports: []*nodev1.Port{{Name: "http-api"}, {Name: "grpc", Port: 65001}},
		},
		GpuDeviceIds: []string{"GPU-1", "GPU-2"}, SecretEnv: map[string]string{"PASSWORD": "hunter2"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	g.output("env", "cwd=")
	out := g.file("env", "output.log")
	port := strconv.Itoa(int(st.GetPorts()[0].GetPort()))
	for _, want := range []string{
		"PLAIN=1\n", "PASSWORD=hunter2\n", "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2\n", "PORT=" + port + "\n",
		"PORT_HTTP_API=" + port + "\n", "PORT_GRPC=65001\n", "GPUAAS_EPOCH=7\n", "args=a b,$HOME;ls",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("output holds no %q:\n%s", want, out)
		}
	}
	if strings.Contains(out, "AGENT_SECRET_OF_OUR_OWN") {
		t.Error("the agent's environment leaked")
	}
	for _, pid := range []int{g.shimOf("env")} {
		for _, f := range []string{"environ", "cmdline"} {
			data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), f))
			if err != nil || strings.Contains(string(data), "hunter2") {
				t.Errorf("%s of the shim holds a secret (%v)", f, err)
			}
		}
	}
	info, err := os.Stat(filepath.Join(g.dir, "state", workspaceA, "env", "spec.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("spec: %v, %v", info, err)
	}
}

// Descendants that ignore TERM, leave the session or outlive their parents are gone when the stop returns.
func TestStopEndsDescendants(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		g.deploy(sh("forks", `trap "" TERM
setsid sh -c 'trap "" TERM; echo p1=$$; sleep 600 & echo p2=$!; wait' &
(setsid sh -c 'echo p3=$$; exec sleep 600' &)
sh -c 'exec env -i /bin/sleep 600' & echo p4=$!
echo p0=$$; wait; sleep 600`))
		for _, p := range []string{"p0=", "p1=", "p2=", "p3=", "p4="} {
			g.output("forks", p)
		}
		pids := map[string]int{}
		for line := range strings.Lines(g.file("forks", "output.log")) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			pids[name], _ = strconv.Atoi(value)
		}
		for name, pid := range pids {
			if !running(pid) {
				t.Fatalf("%s does not run", name)
			}
		}
		if _, err := g.Stop(g.ctx, workspaceA, "forks", 100*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		for name, pid := range pids {
			if running(pid) {
				t.Errorf("%s (%d) outlived the stop", name, pid)
			}
		}
		if st := g.status("forks"); st.GetPhase() != phaseStopped || st.GetExitCode() != 137 {
			t.Errorf("status %v", st)
		}
	})
}

// Processes that the first process of a workload leaves behind are ended when it ends.
func TestLeftoversGoWithTheFirstProcess(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		w := sh("leaves", `setsid sleep 600 & echo left=$!; exit 0`)
		w.RestartPolicy = nodev1.RestartPolicy_RESTART_POLICY_NEVER
		g.deploy(w)
		g.phase("leaves", phaseExited)
		_, after, _ := strings.Cut(g.file("leaves", "output.log"), "left=")
		pid, err := strconv.Atoi(strings.TrimSpace(after))
		if err != nil || running(pid) {
			t.Errorf("leftover %d runs (%v)", pid, err)
		}
	})
}

func TestRemoveForgetsEverything(t *testing.T) {
	g := newRig(t, host(t), false)
	st := g.deploy(sh("gone", "exec sleep 600"))
	for range 2 {
		out, err := g.Remove(g.ctx, workspaceA, "gone", time.Second)
		if err != nil || out.GetPhase() != phaseAbsent {
			t.Fatalf("remove: %v, %v", out, err)
		}
	}
	if running(int(st.GetPid())) {
		t.Error("it runs")
	}
	if _, err := os.Stat(filepath.Join(g.dir, "state", workspaceA)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
	if st.GetCgroup() != "" {
		if _, err := os.Stat(st.GetCgroup()); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("its control group: %v", err)
		}
	}
	if got := g.status("gone").GetPhase(); got != phaseAbsent {
		t.Errorf("phase %v", got)
	}
	if _, err := g.Start(g.ctx, workspaceA, "gone"); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("start: %v", err)
	}
}

func TestReadiness(t *testing.T) {
	g := newRig(t, host(t), false)
	w := sh("slow", "exec sleep 600")
	w.Ports = []*nodev1.Port{{Name: "http"}}
	w.Readiness = &nodev1.Readiness{Tcp: true}
	if st := g.deploy(w); st.GetReady() || !strings.Contains(st.GetDetail(), "not ready") {
		t.Errorf("nothing listens on the port: %v", st)
	}
	d := demo("web")
	d.Readiness.HttpPath = "/no-such-page"
	g.deploy(d)
	g.until("web", "answering 404",
		func(st *nodev1.WorkloadStatus) bool { return !st.GetReady() && strings.Contains(st.GetDetail(), "404") })
	d = demo("web")
	d.Readiness = &nodev1.Readiness{Tcp: true, Port: "http"}
	g.deploy(d)
	g.until("web", "ready", (*nodev1.WorkloadStatus).GetReady)
}

func TestOutputIsBounded(t *testing.T) {
	g := newRig(t, host(t), false)
	g.deploy(sh("loud", `i=0; while [ $i -lt 3000 ]; do
			echo "line $i 0123456789012345678901234567890123456789012345678901234567890123456789"; i=$((i+1)); done
		echo done >&2; exec sleep 600`))
	testkit.Eventually(t, testkit.Patience, func() error {
		if len(g.file("loud", "output.log.1")) == 0 {
			return errors.New("not rotated")
		}
		return nil
	})
	if n := len(g.file("loud", "output.log.1")); n > 64<<10 {
		t.Errorf("the older piece has %d bytes", n)
	}
}

func TestUIDIsolation(t *testing.T) {
	if os.Getuid() != 0 {
		t.Log("not root: the bare cases are what this host does")
		return
	}
	g := newRig(t, host(t), false)
	script := func(other string) string {
		return `id -u; id -g; id -G
cat ` + filepath.Join(g.dir, "state", workspaceA, "mine", "spec.json") + ` && echo LEAK1
ls ` + filepath.Join(g.dir, "state") + ` && echo LEAK2
ls ` + other + ` && echo LEAK3
grep -q NoNewPrivs:.1 /proc/self/status && echo locked
echo home >here && echo wrote
kill -0 1 2>/dev/null && echo LEAK4
echo checked; exec sleep 600`
	}
	a := g.deploy(sh("mine", script(filepath.Join(g.dir, "open", "work", workspaceB, "theirs"))))
	b, err := g.Deploy(g.ctx, process.Request{WorkspaceID: workspaceB, Epoch: 1, Deploy: &nodev1.WorkloadDeploy{
		Workload: sh("theirs", script(filepath.Join(g.dir, "open", "work", workspaceA, "mine"))),
	}})
	if err != nil {
		t.Fatal(err)
	}
	if a.GetUid() == b.GetUid() || a.GetUid() < 200000 || b.GetUid() < 200000 {
		t.Fatalf("uids %d and %d", a.GetUid(), b.GetUid())
	}
	g.output("mine", "checked")
	out := g.file("mine", "output.log")
	id := strconv.Itoa(int(a.GetUid()))
	if !strings.HasPrefix(out, id+"\n"+id+"\n"+id+"\n") || strings.Contains(out, "LEAK") ||
		!strings.Contains(out, "wrote") || !strings.Contains(out, "locked") {
		t.Errorf("workload says:\n%s", out)
	}
	again, err := newRuntime(g.dir, testkit.Logger(t), false)
	if err != nil {
		t.Fatal(err)
	}
	all, err := again.Status(g.ctx, workspaceA, "mine")
	if err != nil || len(all) != 1 || all[0].GetUid() != a.GetUid() || !all[0].GetAdopted() {
		t.Errorf("after a restart of the agent: %v, %v; want uid %d, adopted", all, err, a.GetUid())
	}
}

func TestControlGroups(t *testing.T) {
	g := newRig(t, host(t), false)
	groups := isolation.DetectCgroups(g.dir)
	if groups.Version == 0 {
		t.Log("this host gives no control groups; the bare cases are what it does")
		return
	}
	st := g.deploy(sh("held", "setsid sleep 600 & echo child=$!; exec sleep 601"))
	g.output("held", "child=")
	if st.GetCgroup() == "" {
		t.Fatalf("no control group: %v", st)
	}
	procs, err := os.ReadFile(filepath.Join(st.GetCgroup(), "cgroup.procs"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(strings.Fields(string(procs))); n != 2 ||
		!strings.Contains(string(procs), strconv.Itoa(int(st.GetPid()))) {
		t.Errorf("members %q, want the workload and its child", procs)
	}
	if shim := strconv.Itoa(g.shimOf("held")); strings.Contains(" "+strings.Join(strings.Fields(string(procs)), " ")+" ",
		" "+shim+" ") {
		t.Error("the shim stands in its workload's group, and would be killed with it")
	}
	// An earlier agent left the group of a workload that does not exist.
	left := filepath.Join(groups.Roots[0], workspaceB, "gone")
	if err := os.MkdirAll(left, 0o755); err != nil { // the kernel's file system
		t.Fatal(err)
	}
	if _, err := newRuntime(g.dir, testkit.Logger(t), false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Dir(left)); !os.IsNotExist(err) {
		t.Errorf("the group of a workload that is gone is left: %v", err)
	}
	if procs, err := os.ReadFile(filepath.Join(st.GetCgroup(), "cgroup.procs")); err != nil || len(procs) == 0 {
		t.Errorf("the group of a workload that runs: %q, %v", procs, err)
	}
	if limit, err := os.ReadFile(filepath.Join(st.GetCgroup(), "pids.max")); err == nil &&
		strings.TrimSpace(string(limit)) != "4096" {
		t.Errorf("pids.max %s", limit)
	}
}

func TestForkBombEnds(t *testing.T) {
	eachHost(t, func(t *testing.T, g *rig) {
		t.Helper()
		g.deploy(sh("bomb", `f() { setsid sh -c 'i=0; while :; do sleep 0.01 & i=$((i+1)); [ $i -gt 50 ] && wait; done' & }
			f; f; f; echo lit; wait`))
		g.output("bomb", "lit")
		if _, err := g.Stop(g.ctx, workspaceA, "bomb", 50*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	})
}

func TestDemoMain(t *testing.T) {
	testkit.IO(t)
	t.Setenv("PORT", "")
	if got := process.DemoMain(nil); got != 64 {
		t.Errorf("without a port: %d", got)
	}
}
