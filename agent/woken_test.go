package agent_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/agent"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// processes are those in the record of a workload: its shim and its first process, with the mark of its last run.
type processes struct {
	Run         string
	Shim, Child struct{ PID int }
}

func recorded(t *testing.T, cfg agent.Config, workspace string) processes {
	t.Helper()
	var p processes
	data, err := os.ReadFile(filepath.Join(cfg.StateDir, "workloads", workspace, "work", "state.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &p); err != nil {
		t.Fatal(err)
	}
	return p
}

func lives(pid int) bool {
	data, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	_, after, _ := strings.Cut(string(data), ") ")
	return err == nil && pid > 0 && !strings.HasPrefix(after, "Z")
}

// woken returns a host on which the workload "work" of epoch 1 was deployed and none of its processes runs, as after a
// boot.
func woken(t *testing.T) (*mesh, agent.Config, string) {
	t.Helper()
	m := newMesh(t)
	cfg := config(passable(t))
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	workspace := ids.New()
	payload, err := proto.Marshal(&nodev1.WorkloadDeploy{Workload: &nodev1.Workload{
		Name: "work", Command: []string{"/bin/sleep", "600"}, RestartPolicy: nodev1.RestartPolicy_RESTART_POLICY_ALWAYS,
	}})
	if err != nil {
		t.Fatal(err)
	}
	m.offer(envelope.Task{Type: "workload.deploy", WorkspaceID: workspace, Epoch: 1, OpSeq: 1, Payload: payload})
	select {
	case result := <-m.results:
		if result.GetState() != commonv1.TaskState_TASK_STATE_SUCCEEDED {
			t.Fatalf("deployed: %v", result)
		}
	case <-time.After(time.Minute):
		t.Fatal("not deployed")
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
	killed(t, recorded(t, cfg, workspace))
	return m, cfg, workspace
}

// killed ends the processes of a record: the shim first, which would bring the workload back.
func killed(t *testing.T, p processes) {
	t.Helper()
	for _, pid := range []int{p.Shim.PID, p.Child.PID} {
		if lives(pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		testkit.Eventually(t, testkit.Patience, func() error {
			if lives(pid) {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
	}
}

// passable is a directory through which users of workspaces pass; t.TempDir is closed to them.
func passable(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "gpuaas-agent-") //nolint:usetesting // t.TempDir is closed to the users of workspaces
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return dir
}

// refusedTimes waits until the agent has been refused and has recorded it so often.
func refusedTimes(t *testing.T, cfg agent.Config, want int64) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
		var times int64
		for _, e := range entries {
			times += e.Count
		}
		if times < want {
			return errors.Join(err, fmt.Errorf("%d records", times))
		}
		return err
	})
}

// An agent that starts after a boot and is refused starts no workload, whether its identity is unknown or is told to
// stop.
func TestNothingIsStartedForARefusedIdentity(t *testing.T) {
	m, cfg, workspace := woken(t)
	defer func() { killed(t, recorded(t, cfg, workspace)) }()
	before := recorded(t, cfg, workspace)
	m.denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_IDENTITY_UNKNOWN, ""), "")
	end, _ := run(t, open(t, cfg))
	refusedTimes(t, cfg, 3)
	if err := end(); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_EPOCH_SUPERSEDED, ""), "")
	m.mu.Unlock()
	_, done := run(t, open(t, cfg))
	select {
	case err := <-done:
		if !errors.Is(err, agent.ErrReplaced) {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it goes on")
	}
	if after := recorded(t, cfg, workspace); after.Run != before.Run || lives(after.Child.PID) || lives(after.Shim.PID) {
		t.Errorf("the workload was started: %+v, was %+v", after, before)
	}
}

// An agent that is admitted after a boot starts the workloads whose epochs the control plane lists, once it has sent
// the list.
func TestAfterABootWhatIsListedIsStarted(t *testing.T) {
	m, cfg, workspace := woken(t)
	defer func() { killed(t, recorded(t, cfg, workspace)) }()
	before := recorded(t, cfg, workspace)
	m.mu.Lock()
	m.lists = true
	m.mu.Unlock()
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	m.waitObserved(workspace, nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED)
	if now := recorded(t, cfg, workspace); now.Run != before.Run {
		t.Fatalf("started before it was listed: %+v", now)
	}
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_RunList{RunList: &nodev1.RunList{
		MayRun: []*nodev1.WorkspaceEpoch{{WorkspaceId: workspace, Epoch: 1}},
	}}})
	m.waitObserved(workspace, nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING)
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if now := recorded(t, cfg, workspace); !lives(now.Child.PID) {
		t.Fatal("the workload ended with its agent")
	}
	// The same instance, replaced while its workload runs: it is stopped before the agent ends.
	m.mu.Lock()
	m.denial = fault.ToDenial(fault.New(commonv1.Reason_REASON_EPOCH_ENDED, ""), "")
	m.mu.Unlock()
	running := recorded(t, cfg, workspace)
	_, done := run(t, open(t, cfg))
	select {
	case err := <-done:
		if !errors.Is(err, agent.ErrReplaced) {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("it goes on")
	}
	if lives(running.Child.PID) || lives(running.Shim.PID) {
		t.Error("the agent ended before its workload")
	}
}

// A control plane of an earlier version sends no list: its admission is enough.
func TestAnOlderControlPlaneListsNothing(t *testing.T) {
	m, cfg, workspace := woken(t)
	defer func() { killed(t, recorded(t, cfg, workspace)) }()
	end, _ := run(t, open(t, cfg))
	m.waitObserved(workspace, nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING)
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
