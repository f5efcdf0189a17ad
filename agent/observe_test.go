package agent_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAWipedDirectoryIsReported: the agent reports the directories of a workspace with its workloads, and reports anew
// when one is gone.
func TestAWipedDirectoryIsReported(t *testing.T) {
	testkit.IO(t)
	m := newMesh(t)
	cfg := config(passable(t))
	enrolled(t, m, cfg)
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	workspace := ids.New()
	next := func(what string, has bool) {
		t.Helper()
		deadline := time.After(2 * time.Minute)
		for {
			select {
			case o := <-m.observed:
				if o.GetWorkspaceId() == workspace && o.GetStorage() != nil &&
					slices.Contains(o.GetStorage().GetNames(), "data") == has {
					return
				}
			case <-deadline:
				t.Fatalf("not reported in time: %s", what)
			}
		}
	}
	m.request(workspace, 1, commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE, &nodev1.StorageAllocate{Name: "data"})
	made := &nodev1.StorageAllocateOutput{}
	var result *nodev1.TaskResult
	select {
	case result = <-m.results:
	case <-time.After(2 * time.Minute):
		t.Fatal("the storage is not made")
	}
	if err := proto.Unmarshal(result.GetOutput(), made); err != nil || made.GetPath() == "" {
		t.Fatalf("the storage is %v (%v)", made, err)
	}
	m.request(workspace, 2, commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY, &nodev1.WorkloadDeploy{Workload: &nodev1.Workload{
		Name: "work", Command: []string{"/bin/sh", "-c", "exec sleep 600"},
	}})
	next("the directory", true)
	if err := os.RemoveAll(made.GetPath()); err != nil {
		t.Fatal(err)
	}
	// Any change of a workload is a round of reports; without one the next full round is.
	m.request(workspace, 3, commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP, &nodev1.WorkloadRef{Name: "work"})
	next("that the directory is gone", false)
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

// TestAMachineReportsWhatItHasNothingOf: a workspace that the control plane lists and the host knows nothing of is
// reported without workloads and directories.
func TestAMachineReportsWhatItHasNothingOf(t *testing.T) {
	testkit.IO(t)
	m := newMesh(t)
	cfg := config(passable(t))
	cfg.ObserveEvery = 50 * time.Millisecond
	enrolled(t, m, cfg)
	m.mu.Lock()
	m.lists = true
	m.mu.Unlock()
	end, _ := run(t, open(t, cfg))
	m.wait("admitted")
	workspace := ids.New()
	m.send(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_RunList{RunList: &nodev1.RunList{
		MayRun: []*nodev1.WorkspaceEpoch{{WorkspaceId: workspace, Epoch: 4}},
	}}})
	select {
	case o := <-m.observed:
		if o.GetWorkspaceId() != workspace || o.GetEpoch() != 4 || len(o.GetWorkloads()) != 0 || o.GetStorage() == nil ||
			len(o.GetStorage().GetNames()) != 0 {
			t.Errorf("reported %v", o)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("nothing is reported of a workspace that is gone")
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
