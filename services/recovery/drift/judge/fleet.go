package judge

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
	fleets "github.com/gpuaas/mesh/services/recovery/fleet"
)

// recheck is how often each replica evaluates the open incidents of equal verdicts without a change of a verdict: the
// fleet may have grown or shrunk, the policy may have changed, and the replica that opened them may be gone.
const recheck = 30 * time.Second

// never are the reasons that are no incident of many nodes: people and lifecycle decide them, or they are the control
// plane's and have incidents of their own.
var never = []commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED,
	commonv1.DriftReason_DRIFT_REASON_DISCONNECTED,
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED,
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK,
	commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE,
	commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS,
}

// follows are the reasons that follow from what is wrong with the control plane: while there is a verdict on it, they
// open no incident beside its own.
var follows = []commonv1.DriftReason{
	commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN,
	commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE,
	commonv1.DriftReason_DRIFT_REASON_NODE_NOT_ADMITTED,
	commonv1.DriftReason_DRIFT_REASON_IDENTITY_REJECTED,
	commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED,
}

// reasonsOf collects the reasons that verdicts began or ended with.
type reasonsOf map[commonv1.DriftReason]bool

// turned notes that the verdict on a node has another reason.
func (t *takenNodes) turned(was, now commonv1.DriftReason) {
	if was == now {
		return
	}
	if t.reasons == nil {
		t.reasons = reasonsOf{}
	}
	t.reasons[was], t.reasons[now] = true, true
}

// fleetWide makes one incident of a reason that many nodes have begun to have, and ends one that few have still. Only
// reasons are counted that the round's verdicts have changed, and from time to time those whose incident is open.
func (j *Judge) fleetWide(ctx context.Context, tx pgx.Tx, s *seen, changed reasonsOf) error {
	known := maps.Clone(changed)
	if s.Now.Sub(j.rechecked) >= recheck {
		list, err := fleets.OpenDrifts(ctx, tx)
		if err != nil {
			return err
		}
		for _, reason := range list {
			if known == nil {
				known = reasonsOf{}
			}
			known[reason] = true
		}
		j.rechecked = s.Now
	}
	var list []fleets.Drift
	for _, reason := range slices.Sorted(maps.Keys(known)) {
		row, ok := drift.RowOf(reason)
		if !ok || slices.Contains(never, reason) {
			continue
		}
		list = append(list, fleets.Drift{
			Reason: reason, Severity: row.Severity, NextAction: row.NextAction,
			Opens:     s.Fleet == names.Of(never[0]) || !slices.Contains(follows, reason),
			Suspicion: fault.Suspicion(reason),
		})
	}
	set := j.deps.Policy.Current()
	return fleets.EvaluateDrift(ctx, tx, j.deps.Logger, s.Now, set.BrakeFleetFraction(), list...)
}
