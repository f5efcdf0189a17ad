package process_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/mesh/agent/runtime/isolation"
	"github.com/gpuaas/mesh/agent/runtime/process"
	"github.com/gpuaas/mesh/agent/runtime/uid"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/cgroup"
	"github.com/gpuaas/mesh/internal/testkit"
)

// The test binary is also the agent's binary: shims are its subcommand, and so are the small programs that serve as
// workloads.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "shim":
			os.Exit(process.ShimMain(os.Args[2:]))
		case "demo-workload":
			os.Exit(process.DemoMain(os.Args[2:]))
		case "test-agent":
			os.Exit(agentMain(os.Args[2:]))
		}
	}
	// A process under the race detector lingers for a second; there are hundreds of them here.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// agentMain is an agent to be killed: it deploys the workload on its standard input, prints the result, and supervises
// until it ends.
func agentMain(args []string) int {
	r, err := newRuntime(args[0], slog.New(slog.DiscardHandler), false)
	if err != nil {
		_, _ = fmt.Fprintln(os.Stdout, err)
		return 1
	}
	var deploy nodev1.WorkloadDeploy
	line, _ := bufio.NewReader(os.Stdin).ReadBytes('\n')
	if err := protojson.Unmarshal(line, &deploy); err != nil {
		_, _ = fmt.Fprintln(os.Stdout, err)
		return 1
	}
	st, err := r.Deploy(context.Background(), process.Request{WorkspaceID: workspaceA, Epoch: 1, Deploy: &deploy})
	if err != nil {
		_, _ = fmt.Fprintln(os.Stdout, err)
		return 1
	}
	_ = json.NewEncoder(os.Stdout).Encode(st.GetPid())
	_ = r.Run(context.Background())
	return 0
}

const (
	workspaceA = "01970000-0000-7000-8000-00000000000a"
	workspaceB = "01970000-0000-7000-8000-00000000000b"
)

// newRuntime makes a runtime over dir, as an agent that starts there would.
func newRuntime(dir string, logger *slog.Logger, bare bool) (*process.Runtime, error) {
	uids, err := uid.Open(uid.Config{Dir: filepath.Join(dir, "uids"), Disabled: os.Getuid() != 0 || bare})
	if err != nil {
		return nil, err
	}
	var groups isolation.Cgroups
	if !bare {
		groups = isolation.DetectCgroups(dir)
	}
	return process.New(process.Deps{Logger: logger, UIDs: uids}, process.Config{
		StateDir: filepath.Join(dir, "state"), WorkDir: filepath.Join(dir, "open"), Cgroups: groups, NoRoot: bare,
		BackoffMin: 20 * time.Millisecond, BackoffMax: 100 * time.Millisecond, CheckEvery: 20 * time.Millisecond,
		LogBytes:  64 << 10,
		CalmAfter: 8 * time.Second,
	})
}

// host is a directory that workspaces may pass through; t.TempDir is closed to other users.
func host(t *testing.T) string {
	t.Helper()
	testkit.IO(t)
	dir, err := os.MkdirTemp("", "gpuaas-process-") //nolint:usetesting // t.TempDir is closed to the uids of workspaces
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cgroup.Remove(dir); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

type rig struct {
	*process.Runtime
	t   *testing.T
	ctx context.Context
	dir string
}

func newRig(t *testing.T, dir string, bare bool) *rig {
	t.Helper()
	r, err := newRuntime(dir, testkit.Logger(t), bare)
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{Runtime: r, t: t, ctx: testkit.Context(t), dir: dir}
	t.Cleanup(func() {
		for _, ws := range []string{workspaceA, workspaceB} {
			all, err := r.Status(context.Background(), ws, "")
			if err != nil {
				t.Error(err)
			}
			for _, st := range all {
				if _, err := r.Remove(context.Background(), ws, st.GetName(), time.Millisecond); err != nil {
					t.Error(err)
				}
			}
		}
	})
	return g
}

// supervise runs the agent-side loop until the returned function is called.
func (g *rig) supervise() func() {
	ctx, cancel := context.WithCancel(g.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = g.Run(ctx)
	}()
	stop := func() { cancel(); <-done }
	g.t.Cleanup(stop)
	return stop
}

func (g *rig) deploy(w *nodev1.Workload) *nodev1.WorkloadStatus {
	g.t.Helper()
	st, err := g.Deploy(g.ctx, process.Request{
		WorkspaceID: workspaceA, Epoch: 1,
		Deploy: &nodev1.WorkloadDeploy{Workload: w},
	})
	if err != nil {
		g.t.Fatalf("deploy: %v\n%s", err, g.file(w.GetName(), "shim.log"))
	}
	return st
}

func (g *rig) status(name string) *nodev1.WorkloadStatus {
	g.t.Helper()
	all, err := g.Status(g.ctx, workspaceA, name)
	if err != nil || len(all) != 1 {
		g.t.Fatalf("status: %v, %v", all, err)
	}
	return all[0]
}

func (g *rig) file(workload, name string) string {
	data, _ := os.ReadFile(filepath.Join(g.dir, "state", workspaceA, workload, name))
	return string(data)
}

// until waits for a status that ok accepts.
func (g *rig) until(name, what string, ok func(*nodev1.WorkloadStatus) bool) *nodev1.WorkloadStatus {
	g.t.Helper()
	var last *nodev1.WorkloadStatus
	testkit.Eventually(g.t, testkit.Patience, func() error {
		if last = g.status(name); ok(last) {
			return nil
		}
		return fmt.Errorf("not %s: %v; %s", what, last, g.file(name, "shim.log"))
	})
	return last
}

func (g *rig) phase(name string, want nodev1.WorkloadPhase) *nodev1.WorkloadStatus {
	g.t.Helper()
	return g.until(name, want.String(), func(st *nodev1.WorkloadStatus) bool { return st.GetPhase() == want })
}

func (g *rig) output(workload, want string) {
	g.t.Helper()
	testkit.Eventually(g.t, testkit.Patience, func() error {
		if got := g.file(workload, "output.log"); !strings.Contains(got, want) {
			return fmt.Errorf("output %q holds no %q", got, want)
		}
		return nil
	})
}

// shimOf returns the pid of a workload's shim.
func (g *rig) shimOf(name string) int {
	g.t.Helper()
	var s struct {
		Shim struct {
			PID int `json:"pid"`
		} `json:"shim"`
	}
	if err := json.Unmarshal([]byte(g.file(name, "state.json")), &s); err != nil || s.Shim.PID == 0 {
		g.t.Fatalf("no shim: %v", err)
	}
	return s.Shim.PID
}

func running(pid int) bool {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(data), ") ")
	return !strings.HasPrefix(after, "Z")
}

func goneSoon(t *testing.T, pid int) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		if running(pid) {
			return fmt.Errorf("process %d still runs", pid)
		}
		return nil
	})
}

func kill9(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	goneSoon(t, pid)
}

func sh(name, script string) *nodev1.Workload {
	return &nodev1.Workload{Name: name, Command: []string{"/bin/sh", "-c", script}}
}

// agentProcess starts an agent in a process of its own that deploys w, and returns it with the workload's pid.
func agentProcess(t *testing.T, dir string, w *nodev1.Workload) (*exec.Cmd, int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "test-agent", dir)
	data, err := protojson.Marshal(&nodev1.WorkloadDeploy{Workload: w})
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = strings.NewReader(strings.ReplaceAll(string(data), "\n", " ") + "\n")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil && !errors.Is(err, os.ErrClosed) {
		t.Fatalf("agent: %v", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("agent says %q", line)
	}
	return cmd, pid
}

// touch makes an empty file in the working directory of a workload.
func (g *rig) touch(workload, name string) {
	g.t.Helper()
	path := filepath.Join(g.dir, "open", "work", workspaceA, workload, name)
	if err := os.WriteFile(path, nil, 0o644); err != nil { // for the workload's own user
		g.t.Fatal(err)
	}
}
