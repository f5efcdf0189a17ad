package watch

import (
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/observation"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// observedOn names a workspace as one node has it.
type observedOn struct{ workspaceID, nodeID string }

// observed is what an observation shows of the workloads of a workspace.
type observed struct {
	digest observation.Digest
	stale  bool
}

// shows reports whether an event may change what a watcher sees. Agents repeat their observations; an observation that
// shows the same of the workloads as the last one of its node changes nothing. The first observation since there is a
// watcher may.
func (h *Hub) shows(r events.Record) bool {
	if r.Kind != project.KindObservation {
		return true
	}
	var seen nodev1.Observation
	if err := r.Decode(&seen); err != nil {
		return false // parked by the projection as well
	}
	at := observedOn{r.WorkspaceID, r.NodeID}
	if len(seen.GetWorkloads()) == 0 {
		delete(h.seen, at)
		return true
	}
	// A workspace does not show its directories.
	digest, err := observation.Of(&nodev1.Observation{Epoch: seen.GetEpoch(), Workloads: seen.GetWorkloads()})
	if err != nil {
		return true
	}
	now := observed{digest, seen.GetStaleSince() != nil}
	before, known := h.seen[at]
	if len(h.seen) >= mostObserved {
		clear(h.seen) // the next observation of each is sent once more
	}
	h.seen[at] = now
	return !known || before != now
}

// mostObserved is how many entries of seen are kept at most. Most agents that report are instances, which end without a
// last report that would remove their entry.
const mostObserved = 1 << 16
