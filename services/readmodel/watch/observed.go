package watch

import (
	"strings"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// observedOn names a workspace as one node has it.
type observedOn struct{ workspaceID, nodeID string }

// shows reports whether an event may change what a watcher sees. Agents repeat their observations; one that shows the same workloads in the same trouble as the
// last one of its node changes nothing. The first one since somebody watches may.
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
		clear(h.seen) // each is sent once more
	}
	h.seen[at] = now
	return !known || before != now
}

// mostObserved bounds what is remembered of observations: most of those who report are instances, which end without saying that nothing is left.
const mostObserved = 1 << 16

// troubleOf spells which workloads of an observation do not go on.
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
