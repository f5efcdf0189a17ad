package judge

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// evidence returns what a round has seen of the control plane: whether replicas of nodeapi beat, whether the mesh is in
// rollback mode, and whether the ingress trusts the certificates that the authority issues. A mesh in which no replica
// has ever beaten has no outage. A replica that leaves counts until its last beat is old, so that a restart of the only
// one is no outage.
func (s *seen) evidence() []*collect.Kept {
	beats := drift.Evidence{
		Part: commonv1.DriftPart_DRIFT_PART_CONTROL_PLANE, Source: drift.FromReplicas, ObservedAt: s.Now,
	}
	if !s.Lives && s.BeatAt != nil && s.Now.Sub(*s.BeatAt) >= s.outageAfter {
		beats.Reason, beats.ObservedAt = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_OUTAGE, *s.BeatAt
		beats.Detail = "no replica of nodeapi beats"
	}
	history := drift.Evidence{
		Part: commonv1.DriftPart_DRIFT_PART_CONTROL_PLANE, Source: drift.FromRollback, ObservedAt: s.Now,
	}
	if s.Rollback {
		history.Reason = commonv1.DriftReason_DRIFT_REASON_CONTROL_PLANE_ROLLBACK
		history.Detail = "the database is older than what nodes or the launch log remember"
		history.CorrelationID = s.RollbackIncident
	}
	return []*collect.Kept{{Evidence: beats}, {Evidence: history}, {Evidence: s.trustEvidence()}}
}

// trustEvidence returns what the preflight of the authority has found. That nothing was proven is no evidence.
func (s *seen) trustEvidence() drift.Evidence {
	e := drift.Evidence{Part: commonv1.DriftPart_DRIFT_PART_AUTHORITY, Source: drift.FromReplicas, ObservedAt: s.Now}
	if s.Untrusted != "" {
		e.Reason, e.Detail = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS, s.Untrusted
		e.CorrelationID = s.UntrustedIncident
		if s.UntrustedSince != nil {
			e.ObservedAt = *s.UntrustedSince
		}
	}
	return e
}

// judgeEveryNode concludes the verdict on the control plane, and reports whether it has changed. Nothing is written
// about any node: the verdict holds for each that is not connected. Nothing is locked unless there is a change to
// write. Of replicas that find one at once the first one writes it.
func judgeEveryNode(ctx context.Context, tx pgx.Tx, s *seen, set policy.Set) (bool, error) {
	observed := s.evidence()
	list := make([]drift.Evidence, len(observed))
	for i, e := range observed {
		list[i] = e.Evidence
	}
	v := drift.ClassifyFleet(list, s.Now).Under(set)
	// While the ingress refuses certificates, the side that is at fault may change, and the next action with it.
	if names.Of(v.Reason) == s.Fleet && v.Reason != commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS {
		return false, nil
	}
	read, err := readVerdicts(ctx, tx, []string{collect.EveryNode})
	if err != nil {
		return false, err
	}
	if p := read[collect.EveryNode]; p != nil && (s.endedByAnother(p.body, v) || !p.become(v, list, health{}, s.Now)) {
		return false, nil
	}
	row, err := pg.One[verdictRow](ctx, tx, lockVerdict, collect.EveryNode)
	if err != nil {
		return false, fmt.Errorf("lock verdict on the control plane: %w", err)
	}
	present, err := row.read()
	if err != nil {
		return false, err
	}
	if v.Reason == 0 { // the end belongs to what has ended
		v.CorrelationID = present.body.GetCorrelationId()
	}
	if s.endedByAnother(present.body, v) || !present.become(v, list, health{}, s.Now) {
		return false, nil
	}
	if err := collect.SaveEvidence(ctx, tx, observed); err != nil {
		return false, err
	}
	return true, saveVerdicts(ctx, tx, []*standing{present})
}

// againAfter is how long the verdict that the ingress refuses certificates stays ended after another replica has ended
// it.
const againAfter = 30 * time.Second

// endedByAnother reports whether the verdict that the ingress refuses certificates was ended a short while ago though
// the mismatch had begun before and lasts. During an upgrade a replica of a build that knows nothing of the preflight
// does so in each of its rounds: two builds would write a verdict and an event in each of theirs.
func (s *seen) endedByAnother(present *recoveryv1.NodeVerdict, v drift.Verdict) bool {
	const untrusted = commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS
	ended := present.GetEnded()
	if v.Reason != untrusted || present.GetReason() == untrusted || ended.GetReason() != untrusted ||
		s.UntrustedSince == nil {
		return false
	}
	at := ended.GetEndedAt().AsTime()
	return s.UntrustedSince.Before(at) && s.Now.Before(at.Add(againAfter))
}
