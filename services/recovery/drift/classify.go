package drift

import (
	"cmp"
	"slices"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// Verdict is what Classify concludes. Two verdicts may be compared with ==, but for At, which is the time of the
// conclusion.
type Verdict struct {
	Reason     commonv1.DriftReason // unspecified: nothing is wrong, or it is disconnected only
	UserState  commonv1.UserState
	Severity   commonv1.Severity
	Owner      string
	NextAction string
	// ObservedAt is the time of the first evidence of the reason, and CorrelationID is that evidence's. Of a verdict
	// without evidence they are zero.
	ObservedAt    time.Time
	CorrelationID string
	DetectWithin  time.Duration // after ObservedAt
	RecoverWithin time.Duration // after the verdict; zero: a person decides
	At            time.Time     // the now of Classify
}

// Classify returns what the evidence about one node, and that about the control plane, proves at the given time.
func Classify(evidence []Evidence, now time.Time) Verdict {
	return classify(evidence, now, hearingOf(evidence, now))
}

// ClassifyFleet returns what evidence about the control plane proves, which is the verdict about every node that is not
// connected. Evidence about a node does not count.
func ClassifyFleet(evidence []Evidence, now time.Time) Verdict {
	return classify(evidence, now, fleet)
}

// hearing is whether the agent is heard, as far as fresh evidence tells.
type hearing int

const (
	unknown hearing = iota
	heard           // a session serves it
	silent          // it has none, whatever else is said
	pending         // it has not enrolled yet, which is no failure
	fleet           // not asked: the verdict is about the control plane
)

func hearingOf(evidence []Evidence, now time.Time) hearing {
	out := unknown
	for i := range evidence {
		e := &evidence[i]
		if e.Stale(now) {
			continue
		}
		switch h := e.hearing(); h {
		case pending:
			return pending
		case silent:
			out = silent
		case heard:
			if out == unknown {
				out = heard
			}
		case unknown, fleet:
		}
	}
	return out
}

// hearing returns what one piece of evidence tells about whether the agent is heard. Only the records of the control
// plane do, never the host.
func (e *Evidence) hearing() hearing {
	if e.NodeID == "" {
		return unknown
	}
	if e.Source == FromIdentity && e.Reason == 0 && e.Detail == DetailPending {
		return pending
	}
	if e.Source != FromSession || e.Part != commonv1.DriftPart_DRIFT_PART_PROCESS {
		return unknown
	}
	switch e.Reason {
	case commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED:
		return heard
	case commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN, commonv1.DriftReason_DRIFT_REASON_DISCONNECTED:
		return silent
	default:
		return unknown
	}
}

// Heard reports whether a session serves the agent, as far as fresh evidence tells.
func Heard(evidence []Evidence, now time.Time) bool { return hearingOf(evidence, now) == heard }

// Heard reports whether it tells that a session serves the agent.
func (e *Evidence) Heard() bool { return e.hearing() == heard }

// Proves reports whether its source is one that may see its reason.
func (e *Evidence) Proves() bool {
	row, ok := RowOf(e.Reason)
	return ok && row.by.has(e.Source)
}

// counts reports whether fresh evidence counts for its reason.
func (e *Evidence) counts(h hearing) bool {
	if e.Reason <= 0 || int(e.Reason) >= len(rows) || h == fleet && e.NodeID != "" {
		return false
	}
	row := &rows[e.Reason]
	if !row.by.has(e.Source) {
		return false
	}
	connects := h == heard || h == pending
	if (unproven.has(e.Source) || e.Source == FromEnrolment) && connects {
		return false
	}
	switch row.holds {
	case unheard:
		return !connects
	case connected:
		return h == heard
	case always:
	}
	return true
}

// explains reports whether evidence of the host names no reason and tells why the agent is not heard.
func (e *Evidence) explains(h hearing) bool {
	return e.Source == FromHost && e.Reason == 0 && e.Detail != "" && (h == silent || h == unknown)
}

func classify(evidence []Evidence, now time.Time, h hearing) Verdict {
	var (
		best    *Row
		first   *Evidence
		refused bool // an agent's version has work refused
		off     bool // the policy leaves recovery to operators
	)
	for i := range evidence {
		e := &evidence[i]
		if e.Stale(now) || !e.counts(h) {
			continue
		}
		row := &rows[e.Reason]
		switch {
		case best == nil || row.rank > best.rank:
			best, first = row, e
		case row == best && CompareEvidence(e, first) < 0:
			first = e
		}
		refused = refused || e.Reason == commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT &&
			e.Part == commonv1.DriftPart_DRIFT_PART_TASKS
		// Of what blocks a recovery the control plane itself sees the policy alone.
		off = off || e.Reason == commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED && e.Source == FromEnrolment
	}
	unreachable := &rows[commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE]
	switch {
	case h == unknown && (best == nil || best.rank < unreachable.rank && !best.explains):
		return verdictOf(unreachable, nil, now)
	case best == nil:
		return well(evidence, now, h)
	}
	v := verdictOf(best, first, now)
	switch {
	case best.Reason == commonv1.DriftReason_DRIFT_REASON_VERSION_DRIFT && refused:
		v.UserState = operator
	case best.Reason == commonv1.DriftReason_DRIFT_REASON_RECOVERY_ENROLLMENT_BLOCKED && off:
		v.Owner, v.NextAction = offByPolicy.Owner, offByPolicy.NextAction
	}
	return v
}

func verdictOf(row *Row, first *Evidence, now time.Time) Verdict {
	v := Verdict{
		Reason: row.Reason, UserState: row.UserState, Severity: row.Severity, Owner: row.Owner,
		NextAction: row.NextAction, DetectWithin: row.DetectWithin, RecoverWithin: row.RecoverWithin, At: now,
	}
	if first == nil {
		return v
	}
	v.ObservedAt, v.CorrelationID = first.ObservedAt, first.CorrelationID
	switch {
	case row.Reason == commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED && first.Detail == DetailFenced:
		v.NextAction = nextFenced
	case row.Reason == commonv1.DriftReason_DRIFT_REASON_IDENTITY_REVOKED_OR_FENCED && first.Detail == DetailRetired:
		v.NextAction, v.RecoverWithin = nextRetired, 0
	case row.Reason == commonv1.DriftReason_DRIFT_REASON_CERT_UNTRUSTED_BY_INGRESS:
		v.NextAction = nextOfUntrusted(first, v.NextAction)
	case row.Reason == commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL && first.Detail != "":
		v.NextAction += ", in " + first.Detail
	}
	return v
}

// well returns the verdict that names no reason.
func well(evidence []Evidence, now time.Time, h hearing) Verdict {
	v := Verdict{UserState: normal, At: now}
	if h == pending {
		v.NextAction = nextPending
	}
	var first *Evidence
	for i := range evidence {
		e := &evidence[i]
		if h != unknown && e.hearing() == h && !e.Stale(now) && (first == nil || CompareEvidence(e, first) < 0) {
			first = e
		}
	}
	if first != nil {
		v.ObservedAt, v.CorrelationID = first.ObservedAt, first.CorrelationID
	}
	return v
}

// CompareEvidence orders evidence by its time, and evidence of one time by the rest of it.
func CompareEvidence(a, b *Evidence) int {
	return cmp.Or(a.ObservedAt.Compare(b.ObservedAt), cmp.Compare(a.NodeID, b.NodeID), cmp.Compare(a.Part, b.Part),
		cmp.Compare(a.Source, b.Source), cmp.Compare(a.Reason, b.Reason), cmp.Compare(a.Detail, b.Detail),
		cmp.Compare(a.CorrelationID, b.CorrelationID), a.FreshUntil.Compare(b.FreshUntil))
}

// Used returns the evidence from which the verdict follows, of that which it was concluded from: oldest first, and each
// piece once. Of a verdict without a known cause it returns all that is fresh.
func (v Verdict) Used(evidence []Evidence) []Evidence {
	h := hearingOf(evidence, v.At)
	var row Row
	if v.Reason > 0 && int(v.Reason) < len(rows) {
		row = rows[v.Reason]
	}
	// What tells whether the agent is heard is part of the reasoning where it decides whether the reason holds.
	withHearing := row.holds != always || row.by&unproven != 0
	var out []Evidence
	for i := range evidence {
		e := &evidence[i]
		if e.Stale(v.At) {
			continue
		}
		var used bool
		switch v.Reason {
		case commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE:
			used = true
		case commonv1.DriftReason_DRIFT_REASON_UNSPECIFIED:
			used = e.Reason == 0 && !unproven.has(e.Source) || e.hearing() != unknown
		default:
			used = e.Reason == v.Reason && e.counts(h) || withHearing && e.hearing() != unknown ||
				e.Reason == commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT && e.counts(h) || // lifecycle acts on it
				v.Reason == commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN && e.explains(h)
		}
		if used {
			out = append(out, *e)
		}
	}
	slices.SortFunc(out, func(a, b Evidence) int { return CompareEvidence(&a, &b) })
	return slices.CompactFunc(out, func(a, b Evidence) bool { return CompareEvidence(&a, &b) == 0 })
}

// missingHost names the host's record, where it would name a cause.
const missingHost = "host: its diagnostics"

// Missing returns, for a verdict without a known cause, which evidence would name one: what no source has told, and
// what is stale. For the verdict that the agent is down that is the host's record alone. It returns nil for any other
// verdict.
func (v Verdict) Missing(evidence []Evidence) []string {
	switch v.Reason {
	case commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN:
		if slices.ContainsFunc(evidence, func(e Evidence) bool { return e.Source == FromHost && !e.Stale(v.At) }) {
			return nil
		}
		return []string{missingHost}
	case commonv1.DriftReason_DRIFT_REASON_NODE_AGENT_UNREACHABLE:
	default:
		return nil
	}
	var fresh sources
	var stale []string
	for _, e := range evidence {
		if e.Stale(v.At) {
			stale = append(stale, names.Of(e.Source)+" of the "+names.Of(e.Part)+": stale since "+
				e.FreshUntil.UTC().Format(time.RFC3339))
		} else if e.Source > 0 && e.Source < 32 {
			fresh |= of(e.Source)
		}
	}
	out := []string{"session: whether its agent is heard"}
	if !fresh.has(FromIdentity) {
		out = append(out, "identity: the state of its identity")
	}
	if !fresh.has(FromHost) {
		out = append(out, missingHost)
	}
	slices.Sort(stale)
	return append(out, slices.Compact(stale)...)
}
