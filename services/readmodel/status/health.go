package status

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// ShownHealth takes back that a node is healthy if it is not connected, if a reason holds, or if recovery does not
// judge: recovery writes nothing for a node that loses its session for a moment. It changes the node's own verdict.
func ShownHealth(n *readmodelv1.Node) {
	v := n.GetVerdict()
	if len(v.GetChecklist()) == 0 {
		return
	}
	if n.GetConnected() && n.GetReason() == "" && n.GetVerdictStaleSince() == nil {
		ofSession(v, n.GetSince())
		return
	}
	v.HealthySince = nil
	if n.GetConnected() {
		return
	}
	for _, item := range v.GetChecklist() {
		switch item.GetCheck() { //nolint:exhaustive // the others do not follow from the session
		case recoveryv1.HealthCheck_HEALTH_CHECK_HEARTBEAT,
			recoveryv1.HealthCheck_HEALTH_CHECK_SESSION_ON_CURRENT_SERIAL:
			item.Present, item.ObservedAt, item.Detail = false, nil, "no session serves it"
		}
	}
}

// ofSession has no time of a verdict on a healthy node be before the session that serves it, which began at since.
func ofSession(v *recoveryv1.NodeVerdict, since *timestamppb.Timestamp) {
	before := func(at *timestamppb.Timestamp) bool {
		return at != nil && since != nil && at.AsTime().Before(since.AsTime())
	}
	if before(v.GetHealthySince()) {
		v.HealthySince = since
	}
	for _, item := range v.GetChecklist() {
		if before(item.GetObservedAt()) {
			item.ObservedAt = since
		}
	}
}
