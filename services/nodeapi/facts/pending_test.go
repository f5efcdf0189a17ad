package facts

import (
	"log/slog"
	"testing"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// TestAFullWriterTakesNewerObservations: where as many wait as may, what is newer of one of them replaces it, and what is of none is left out.
func TestAFullWriterTakesNewerObservations(t *testing.T) {
	w := New(slog.New(slog.DiscardHandler), nil, Replica{}, func() {}, nil, nil)
	node, workspace := ids.New(), ids.New()
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 1})
	for len(w.seen) < observationsPending {
		w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	}
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 2})
	w.Observed(node, "", 1, &nodev1.Observation{WorkspaceId: ids.New()})
	if epoch := w.seen[held{workspace, node}].fact.GetEpoch(); epoch != 2 {
		t.Errorf("the observation of epoch %d waits, want that of epoch 2", epoch)
	}
	if n := len(w.seen); n != observationsPending {
		t.Errorf("%d observations wait, want %d", n, observationsPending)
	}
}
