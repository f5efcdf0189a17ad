package judge

import (
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/ask"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// askHost has the agent of a connected node asked for its host's record, if the reason that has ended, or else the one
// that has begun, is better explained by it. The former reason began with the given version.
func (t *takenNodes) askHost(n *collect.Node, was *recoveryv1.NodeVerdict, began int64, v *standing, h health) {
	if !h.heard || n.State != collect.ActiveState || was.GetReason() == v.body.GetReason() {
		return
	}
	of, from := was, began
	if !unexplained(n, was) {
		of, from = v.body, v.began
	}
	if unexplained(n, of) {
		t.asks = append(t.asks, ask.Request{
			NodeID: n.NodeID, Began: from, Since: of.GetObservedAt().AsTime(), CorrelationID: of.GetCorrelationId(),
		})
	}
}

// unexplained reports whether the reason of a verdict asks the host, and the host has told nothing since the first
// evidence of that reason.
func unexplained(n *collect.Node, v *recoveryv1.NodeVerdict) bool {
	row, _ := drift.RowOf(v.GetReason())
	if !row.AsksHost {
		return false
	}
	for _, e := range n.Evidence {
		if e.Source == drift.FromHost && !e.ObservedAt.Before(v.GetObservedAt().AsTime()) {
			return false
		}
	}
	return true
}
