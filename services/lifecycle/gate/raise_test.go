package gate_test

import (
	"slices"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// TestABatchRaisesTheGatesOfItsNodes checks that each session of a batch raises its own node's gate with its own facts,
// that a node may be in a batch twice, and that each change of a gate is an event of its own.
func TestABatchRaisesTheGatesOfItsNodes(t *testing.T) {
	k := newKit(t)
	instance, replica := ids.New(), ids.New()
	var sessions []*lifecyclev1.SessionReady
	for i := range 20 {
		node := ids.New()
		k.fence(node, 1, i != 7)
		s := session(node, instance, 1)
		s.LedgerId = ids.New()
		if i%2 == 0 {
			s.TaskTypes = []commonv1.TaskType{commonv1.TaskType_TASK_TYPE_PROBE_NOOP}
			s.TaskKeyIds = []string{"k1"}
			s.Host = &commonv1.HostFacts{Kernel: node, Gpus: []*commonv1.Gpu{{}, {}}}
		}
		sessions = append(sessions, s)
	}
	again := session(sessions[3].GetNodeId(), instance, 2)
	sessions = append(sessions, again)
	results := k.ready(replica, sessions...)
	for i, s := range sessions {
		if got, want := results[i].GetAccepted(), i != 7; got != want {
			t.Errorf("session %d: accepted %t, want %t: %v", i, got, want, results[i])
		}
		g, ok, err := gate.Get(k.ctx, k.pool, s.GetNodeId())
		if err != nil || !ok {
			t.Fatal(ok, err)
		}
		want := s
		switch i {
		case 7:
			if g.SessionID != "" || g.Version != 1 {
				t.Errorf("a gate that is shut was raised: %+v", g)
			}
			continue
		case 3:
			want = again
		}
		if g.SessionID != want.GetSessionId() || g.SessionEpoch != want.GetGeneration() ||
			g.LedgerID != want.GetLedgerId() || g.InstanceOfNode != instance || g.ReplicaID != replica || !g.SessionOpen ||
			g.SessionReadyAt == nil || len(g.TaskTypes) != len(want.GetTaskTypes()) ||
			g.Host.GetKernel() != want.GetHost().GetKernel() ||
			len(g.Host.GetGpus()) != len(want.GetHost().GetGpus()) {
			t.Errorf("session %d: %+v, want that of %v", i, g, want)
		}
		changes := []int64{1, 2}
		if want == again {
			changes = []int64{1, 2, 3}
		}
		if got := k.versions(s.GetNodeId()); !slices.Equal(got, changes) {
			t.Errorf("session %d: events of the versions %v, want %v", i, got, changes)
		}
	}
}

// TestAnIdleNodeHasNothingToReconcile checks that the tasks of a session are compared only if its node has tasks in
// flight, or its agent reports any.
func TestAnIdleNodeHasNothingToReconcile(t *testing.T) {
	k := newKit(t)
	k.heard.idle = true
	node, busy := ids.New(), ids.New()
	k.fence(node, 1, true)
	k.fence(busy, 1, true)
	reports := session(busy, ids.New(), 1)
	reports.TasksInFlight = []*commonv1.TaskInFlight{{TaskId: ids.New(), Attempt: 1}}
	k.heard.order = nil
	for i, r := range k.ready(ids.New(), session(node, ids.New(), 1), reports) {
		if !r.GetAccepted() {
			t.Errorf("session %d: %v", i, r)
		}
	}
	if got := k.heard.order; !slices.Equal(got, []string{"lock", "reconcile"}) {
		t.Errorf("calls %v", got)
	}
}
