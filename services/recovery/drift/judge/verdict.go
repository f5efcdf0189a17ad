package judge

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// standing is the present verdict on a node, or on the control plane.
type standing struct {
	nodeID string
	body   *recoveryv1.NodeVerdict // nil: there never was one
	began  int64                   // the version that began the present reason
	ended  *recoveryv1.VerdictPeriod
}

// verdictRow is a row of recovery.verdict.
type verdictRow struct {
	NodeID  string `db:"node_id" expr:"@.node_id::text"`
	Body    []byte `db:"body"`
	Began   int64  `db:"began"`
	Version int64  `db:"version"`
}

func (r verdictRow) read() (*standing, error) {
	s := &standing{nodeID: r.NodeID, began: r.Began}
	if r.Version == 0 {
		return s, nil
	}
	s.body = &recoveryv1.NodeVerdict{}
	if err := proto.Unmarshal(r.Body, s.body); err != nil {
		return nil, fmt.Errorf("read verdict on %s: %w", r.NodeID, err)
	}
	return s, nil
}

var (
	verdictsOf = pg.Define(pg.RoleRecovery, "drift.verdicts_of", `
		SELECT `+pg.Columns[verdictRow]("v")+` FROM recovery.verdict v
		WHERE v.node_id = ANY ($1::uuid[]) ORDER BY v.node_id`)

	lockVerdict = pg.Define(pg.RoleRecovery, "drift.lock_verdict", `
		SELECT `+pg.Columns[verdictRow]("v")+` FROM recovery.verdict v WHERE v.node_id = $1 FOR UPDATE`)

	writeVerdicts = pg.Define(pg.RoleRecovery, "drift.write_verdicts", `
		INSERT INTO recovery.verdict AS v (node_id, reason, body, began, version, since)
		SELECT n.node_id, n.reason, n.body, n.began, n.version, mesh.clock()
		FROM unnest($1::uuid[], $2::text[], $3::bytea[], $4::bigint[], $5::bigint[])
			AS n (node_id, reason, body, began, version)
		ON CONFLICT (node_id) DO UPDATE SET reason = EXCLUDED.reason, body = EXCLUDED.body, began = EXCLUDED.began,
			version = EXCLUDED.version, since = CASE WHEN v.reason = EXCLUDED.reason THEN v.since ELSE EXCLUDED.since END`)

	writePeriods = pg.Define(pg.RoleRecovery, "drift.write_periods", `
		INSERT INTO recovery.verdict_period (period_id, node_id, reason, severity, observed_at, detected_at, ended_at,
			correlation_id, version)
		SELECT n.period_id, n.node_id, n.reason, n.severity, n.observed_at, n.detected_at, n.ended_at, n.correlation_id,
			n.version
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[], $6::timestamptz[],
			$7::timestamptz[], $8::text[], $9::bigint[])
			AS n (period_id, node_id, reason, severity, observed_at, detected_at, ended_at, correlation_id, version)`)

	verdictsAfter = pg.Define(pg.RoleRecovery, "drift.verdicts_after", `
		SELECT `+pg.Columns[verdictRow]("v")+` FROM recovery.verdict v
		WHERE v.node_id > $1::uuid AND v.version > 0 ORDER BY v.node_id LIMIT $2`)
)

func readVerdicts(ctx context.Context, tx pgx.Tx, nodeIDs []string) (map[string]*standing, error) {
	rows, err := pg.All[verdictRow](ctx, tx, verdictsOf, nodeIDs)
	if err != nil {
		return nil, fmt.Errorf("read verdicts: %w", err)
	}
	out := make(map[string]*standing, len(rows))
	for _, r := range rows {
		if out[r.NodeID], err = r.read(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// become makes the verdict the present one, and reports whether that changes it: in its reason, in who acts next and
// how, in what the host's record explains, in how the host's runtime differs, in whether the node is proven healthy, or
// in that it is judged again. Of a reason that goes on, the times stay as they were.
func (s *standing) become(v drift.Verdict, evidence []drift.Evidence, h health, now time.Time) bool {
	was := s.body
	if was == nil && v.Reason == 0 && !h.proven {
		return false
	}
	judged := was.GetStaleSince() == nil
	if was != nil && judged && was.GetReason() == v.Reason && !h.changes(was) && (v.Reason == 0 ||
		was.GetUserState() == v.UserState && was.GetSeverity() == v.Severity && was.GetOwner() == v.Owner &&
			was.GetNextAction() == v.NextAction && !explainsMore(was, v.Used(evidence)) &&
			sameRuntime(was, v.Used(evidence))) {
		return false
	}
	s.body = &recoveryv1.NodeVerdict{
		Reason: v.Reason, UserState: v.UserState, Severity: v.Severity, Owner: v.Owner, NextAction: v.NextAction,
		ObservedAt: timestamppb.New(v.ObservedAt), DetectedAt: timestamppb.New(now),
		CorrelationId: v.CorrelationID, Missing: v.Missing(evidence), Version: was.GetVersion() + 1,
	}
	if s.nodeID != collect.EveryNode {
		s.body.NodeId, s.body.Checklist = s.nodeID, itemMessages(h.items)
	}
	if h.proven {
		s.body.HealthySince = timestamppb.New(now)
	}
	if v.ObservedAt.IsZero() {
		s.body.ObservedAt = s.body.GetDetectedAt()
	}
	if v.DetectWithin > 0 {
		s.body.DetectWithin = durationpb.New(v.DetectWithin)
	}
	if v.RecoverWithin > 0 {
		s.body.RecoverWithin = durationpb.New(v.RecoverWithin)
	}
	for _, e := range v.Used(evidence) {
		s.body.Evidence = append(s.body.Evidence, messageOf(e))
	}
	switch {
	case was.GetReason() == v.Reason && was != nil:
		s.body.ObservedAt, s.body.DetectedAt = was.GetObservedAt(), was.GetDetectedAt()
	case was.GetReason() != 0:
		s.ended = &recoveryv1.VerdictPeriod{
			NodeId: was.GetNodeId(), Reason: was.GetReason(), Severity: was.GetSeverity(), ObservedAt: was.GetObservedAt(),
			DetectedAt: was.GetDetectedAt(), EndedAt: timestamppb.New(now), CorrelationId: was.GetCorrelationId(),
			Version: s.began,
		}
		s.body.Ended = s.ended
		s.began = s.body.GetVersion()
	default:
		s.began = s.body.GetVersion()
	}
	return true
}

// notJudged notes on the present verdict since when the node is not judged, and reports whether that is new: it is
// noted once, until the node is judged again. A node without a verdict gets one that names no reason.
func (s *standing) notJudged(now time.Time) bool {
	if s.body.GetStaleSince() != nil {
		return false
	}
	if s.body == nil {
		s.body = &recoveryv1.NodeVerdict{
			NodeId: s.nodeID, UserState: commonv1.UserState_USER_STATE_NORMAL, ObservedAt: timestamppb.New(now),
			DetectedAt: timestamppb.New(now),
		}
		s.began = 1
	}
	s.body.StaleSince, s.body.Ended = timestamppb.New(now), nil
	s.body.Version++
	return true
}

// explainsMore reports whether there is evidence of the host that a verdict does not name. That it is stale by now
// changes no verdict.
func explainsMore(was *recoveryv1.NodeVerdict, used []drift.Evidence) bool {
	for i := range used {
		e := &used[i]
		if e.Source == drift.FromHost && !slices.ContainsFunc(was.GetEvidence(), func(old *recoveryv1.Evidence) bool {
			return old.GetSource() == e.Source && old.GetPart() == e.Part && old.GetReason() == e.Reason &&
				old.GetDetail() == e.Detail
		}) {
			return true
		}
	}
	return false
}

// sameRuntime reports whether a verdict names the evidence that the host's runtime differs as it is used now, whichever
// reason it has: lifecycle cordons by it.
func sameRuntime(was *recoveryv1.NodeVerdict, used []drift.Evidence) bool {
	const runtime = commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT
	named := 0
	for _, e := range was.GetEvidence() {
		if e.GetReason() == runtime {
			named++
		}
	}
	for i := range used {
		e := &used[i]
		if e.Reason != runtime {
			continue
		}
		if named--; !slices.ContainsFunc(was.GetEvidence(), func(old *recoveryv1.Evidence) bool {
			return old.GetReason() == runtime && old.GetSource() == e.Source && old.GetPart() == e.Part &&
				old.GetDetail() == e.Detail
		}) {
			return false
		}
	}
	return named == 0
}

// messageOf returns evidence as a verdict names it.
func messageOf(e drift.Evidence) *recoveryv1.Evidence {
	out := &recoveryv1.Evidence{
		NodeId: e.NodeID, Part: e.Part, Reason: e.Reason, Source: e.Source, ObservedAt: timestamppb.New(e.ObservedAt),
		Detail: e.Detail, CorrelationId: e.CorrelationID,
	}
	if !e.FreshUntil.IsZero() {
		out.FreshUntil = timestamppb.New(e.FreshUntil)
	}
	return out
}

func (s *standing) event() events.Event {
	return events.Event{
		Kind: "verdict.changed", AggregateType: "verdict", AggregateID: s.nodeID, AggregateVersion: s.body.GetVersion(),
		Payload:     s.body,
		Correlation: events.Correlation{CorrelationID: s.body.GetCorrelationId(), NodeID: s.body.GetNodeId()},
	}
}

// saveVerdicts writes verdicts that have changed, and the ends of those that they end, and appends their events.
func saveVerdicts(ctx context.Context, tx pgx.Tx, changed []*standing) error {
	if len(changed) == 0 {
		return nil
	}
	var nodeIDs, reasons []string
	var bodies [][]byte
	var began, versions []int64
	var ended []*standing
	list := make([]events.Event, 0, len(changed))
	for _, s := range changed {
		body, err := proto.Marshal(s.body)
		if err != nil {
			return fmt.Errorf("write verdict on %s: %w", s.nodeID, err)
		}
		nodeIDs, reasons, bodies = append(nodeIDs, s.nodeID), append(reasons, names.Of(s.body.GetReason())),
			append(bodies, body)
		began, versions = append(began, s.began), append(versions, s.body.GetVersion())
		if s.ended != nil {
			ended = append(ended, s)
		}
		list = append(list, s.event())
	}
	if err := pg.Queue(ctx, tx, writeVerdicts, nodeIDs, reasons, bodies, began, versions); err != nil {
		return fmt.Errorf("write verdicts: %w", err)
	}
	if err := savePeriods(ctx, tx, ended); err != nil {
		return err
	}
	_, err := events.Append(ctx, tx, list...)
	return err
}

func savePeriods(ctx context.Context, tx pgx.Tx, ended []*standing) error {
	if len(ended) == 0 {
		return nil
	}
	var periodIDs, nodeIDs, reasons, severities, correlations []string
	var observed, detected, ends []time.Time
	var versions []int64
	for _, s := range ended {
		p := s.ended
		periodIDs, nodeIDs = append(periodIDs, ids.New()), append(nodeIDs, s.nodeID)
		reasons, severities = append(reasons, names.Of(p.GetReason())), append(severities, names.OfSet(p.GetSeverity()))
		correlations, versions = append(correlations, p.GetCorrelationId()), append(versions, p.GetVersion())
		observed = append(observed, p.GetObservedAt().AsTime())
		detected = append(detected, p.GetDetectedAt().AsTime())
		ends = append(ends, p.GetEndedAt().AsTime())
	}
	err := pg.Queue(ctx, tx, writePeriods, periodIDs, nodeIDs, reasons, severities, observed, detected, ends, correlations,
		versions)
	if err != nil {
		return fmt.Errorf("write verdicts that have ended: %w", err)
	}
	return nil
}

// Announced returns the sources that announce the present verdicts again: that on the control plane, and those on
// nodes.
func Announced() []reannounce.Source {
	return []reannounce.Source{
		{Name: "verdict_on_every_node", Once: true, Page: func(ctx context.Context, tx pgx.Tx, _ string, _ int) (
			[]events.Event, error,
		) {
			found, err := readVerdicts(ctx, tx, []string{collect.EveryNode})
			if s := found[collect.EveryNode]; err == nil && s != nil && s.body != nil {
				return []events.Event{s.event()}, nil
			}
			return nil, err
		}},
		reannounce.Rows("verdicts", verdictsAfter, func(r verdictRow) (events.Event, error) {
			s, err := r.read()
			if err != nil {
				return events.Event{}, err
			}
			return s.event(), nil
		}),
	}
}
