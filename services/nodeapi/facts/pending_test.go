package facts

import (
	"log/slog"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// TestAFullWriterTakesNewerObservations: if the most observations that may wait do so, a newer one of the same
// workspace replaces its older one, and one of another workspace is dropped.
func TestAFullWriterTakesNewerObservations(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	node, workspace := ids.New(), ids.New()
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 1})
	for len(w.seen) < observationsPending {
		w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	}
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 2})
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	if epoch := w.seen[kept{workspace, node}].fact.GetEpoch(); epoch != 2 {
		t.Errorf("the observation of epoch %d waits, want that of epoch 2", epoch)
	}
	if n := len(w.seen); n != observationsPending {
		t.Errorf("%d observations wait, want %d", n, observationsPending)
	}
}

// TestAnObservationBesideOneThatIsWrittenIsKept: if a workload goes from one state to another and back while the other
// is being written, the last observation is kept.
func TestAnObservationBesideOneThatIsWrittenIsKept(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	node, workspace := ids.New(), ids.New()
	observe := func(epoch int64) {
		w.Observed(node, "", 1, &nodev1.Observation{
			WorkspaceId: workspace, Epoch: epoch,
			Workloads: []*nodev1.WorkloadStatus{{Name: "main"}},
		})
	}
	observe(1)
	w.settle(&written{read: map[string]int64{node: 1}, settled: w.takeObserved()})
	w.landed()
	observe(2)
	flying := w.takeObserved()
	observe(1)
	w.settle(&written{settled: flying})
	w.landed()
	if left := w.takeObserved(); len(flying) != 1 || len(left) != 1 || left[0].fact.GetEpoch() != 1 {
		t.Errorf("%d were being written, %d wait after them", len(flying), len(left))
	}
	w.landed()
	if observe(1); len(w.seen) != 1 { // the written observation is still that of epoch 2
		t.Errorf("%d observations wait, want the one that differs from what is written", len(w.seen))
	}
}

// Scenario: the end of a session is reported before an older fact of it, from another goroutine. The end is what is
// written, with the host that the older fact has, and the session is not followed any more.
func TestAnOlderFactDoesNotReplaceANewerOne(t *testing.T) {
	w := New(Deps{Logger: slog.New(slog.DiscardHandler), Wake: func() {}})
	session, node := ids.New(), ids.New()
	fact := func(version int64, state commonv1.SessionState, host *commonv1.HostFacts) {
		w.Session(&nodev1.SessionChanged{
			SessionId: session, NodeId: node, Generation: 1, Version: version, State: state, Host: host,
		})
	}
	fact(2, commonv1.SessionState_SESSION_STATE_CLOSED, nil)
	fact(1, commonv1.SessionState_SESSION_STATE_ADMITTED, &commonv1.HostFacts{MachineId: "machine"})
	facts := w.take()
	if len(facts) != 1 || facts[0].GetVersion() != 2 || facts[0].GetHost().GetMachineId() != "machine" {
		t.Errorf("written is %v, want the end of the session", facts)
	}
	if len(w.observers) != 0 {
		t.Error("a session that has ended is followed")
	}
}
