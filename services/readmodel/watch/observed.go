package watch

import (
	"strings"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// observedOn names a workspace as one node has it.
type observedOn struct{ workspaceID, nodeID string }

// shows reports whether an event may change what a watcher sees. Agents repeat their observations; an observation that
// has the same workloads in the same trouble as the last one of its node changes nothing. The first observation since
// there is a watcher may.
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
	now := troubleOf(&seen)
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

// troubleOf returns, as text, the workloads of an observation that do not run on, and whether the observation is stale.
func troubleOf(seen *nodev1.Observation) string {
	var out strings.Builder
	if seen.GetStaleSince() != nil {
		out.WriteString("stale;")
	}
	for _, w := range seen.GetWorkloads() {
		switch {
		case w.GetCrashLoop():
			out.WriteString(w.GetName() + " loops;")
		case w.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED:
			out.WriteString(w.GetName() + " exited;")
		}
	}
	return out.String()
}
