package watch_test

import (
	"testing"
	"time"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// Scenario: a workload is ready, then runs and is not ready any more, and then is gone from its node. Each changes the
// runtime layer of its workspace, which a watcher gets, although none of them is a crash.
func TestAWorkloadThatIsNotReadyIsAChangeOfItsWorkspace(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Millisecond}, true)
	at := k.workspace(k.A, active)
	at.NodeId, at.Spec = k.A.NodeID, &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{{Name: "main"}}}
	k.Put(at)
	k.sync()
	w := k.watch(watch.Request{Filter: watch.Filter{
		Scope: list.All(), Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES},
	}}, nil)
	w.bootstrapped()
	for _, step := range []struct {
		phase nodev1.WorkloadPhase
		ready bool
		want  readmodelv1.LayerState
	}{
		{nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, true, readmodelv1.LayerState_LAYER_STATE_READY},
		{nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING, false, readmodelv1.LayerState_LAYER_STATE_RUNNING},
		{nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT, false, readmodelv1.LayerState_LAYER_STATE_STOPPED},
	} {
		k.Observe(k.A.NodeID, &nodev1.Observation{
			WorkspaceId: k.A.WorkspaceID, Epoch: at.GetEpoch(),
			Workloads: []*nodev1.WorkloadStatus{{Name: "main", Phase: step.phase, Ready: step.ready}},
		})
		k.sync()
		w.until(step.want.String(), func(f *readmodelv1.WatchResponse) bool {
			return f.GetItem().GetWorkspace().GetRuntime().GetState() == step.want
		})
	}
}
