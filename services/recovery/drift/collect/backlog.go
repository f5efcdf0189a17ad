package collect

import (
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// backlogFresh is how long a backlog counts whose end was not read: lifecycle forgets one a day after its last task.
const backlogFresh = 25 * time.Hour

// readBacklog reads lifecycle's report that tasks of a node have expired in the queue, or that this is over. It is
// evidence as lifecycle writes it, and nothing else of it is taken.
func readBacklog(r events.Record) (change, error) {
	seen := &recoveryv1.Evidence{}
	if err := r.Decode(seen); err != nil {
		return change{}, err
	}
	reason := seen.GetReason()
	if reason != 0 && reason != commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE {
		return change{}, nil // of a newer build
	}
	e := drift.Evidence{
		NodeID: seen.GetNodeId(), Part: commonv1.DriftPart_DRIFT_PART_TASKS, Reason: reason, Source: drift.FromTasks,
		ObservedAt: r.CreatedAt, Detail: seen.GetDetail(), CorrelationID: r.CorrelationID,
	}
	if at := seen.GetObservedAt(); at != nil && at.AsTime().Before(r.CreatedAt) {
		e.ObservedAt = at.AsTime()
	}
	if reason != 0 {
		e.FreshUntil = e.ObservedAt.Add(backlogFresh)
	}
	return change{nodeID: e.NodeID, apply: func(n *Node) {
		if _, known := n.has(e.Part, e.Source); reason != 0 || known {
			n.note(e, r.AggregateVersion)
		}
	}}, nil
}
