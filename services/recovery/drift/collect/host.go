package collect

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// HostRecord is one entry of the record of a host: what its agent failed at. All of it is the host's claim.
type HostRecord struct {
	Code          commonv1.DiagnosticCode
	Detail        string
	SeenAt        time.Time // last, by the host's clock
	NextRetry     time.Duration
	EndedAt       time.Time // zero: it is not over, as far as the host knows
	CorrelationID string
	By            string        // the person who brought it; empty: the agent told it
	Fresh         time.Duration // how long it explains anything, after it was seen; zero: hostFresh
}

const (
	// hostFresh is the longest time for which a record explains anything, after it was seen last.
	hostFresh = 24 * time.Hour
	// hostRepeats is how much later than a failure another may be seen before the one counts as over, for it was not seen
	// again when it would have been tried again.
	hostRepeats = 10 * time.Minute
	// hostRenew is how much longer evidence must count before what it says once more is written again.
	hostRenew = time.Hour
	// MostDetail bounds the detail of evidence, in bytes.
	MostDetail = 512
)

// seenAt returns when a record was seen last, as far as its host is believed: not in the future. A host whose clock is
// wrong says so at a time that is wrong too, which counts as the present. It reports false for a time that is too long
// ago, or none.
func (r *HostRecord) seenAt(now time.Time) (time.Time, bool) {
	tooEarly := r.SeenAt.Before(now.Add(-hostFresh))
	reason, _, _ := drift.ExplainedBy(r.Code)
	if reason == commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW && !r.SeenAt.IsZero() &&
		(tooEarly || r.SeenAt.After(now)) {
		return now, true
	}
	if tooEarly {
		return time.Time{}, false
	}
	if r.SeenAt.After(now) {
		return now, true
	}
	return r.SeenAt, true
}

// InTime reports whether a record is recent enough to explain anything.
func (r *HostRecord) InTime(now time.Time) bool {
	_, ok := r.seenAt(now)
	return ok
}

// OfHost returns what the record of a host is evidence of, at most one piece for each part: the worst of what is not
// over, else what ended last. What was seen no later than the agent was heard is over, and so is what was not seen
// again when it would have been.
func OfHost(nodeID string, records []HostRecord, now, heardAt time.Time) []drift.Evidence {
	newest := time.Time{}
	for i := range records {
		if _, _, known := drift.ExplainedBy(records[i].Code); !known {
			continue
		}
		if at, ok := records[i].seenAt(now); ok && at.After(newest) {
			newest = at
		}
	}
	best := map[commonv1.DriftPart]drift.Evidence{}
	for i := range records {
		r := &records[i]
		reason, part, known := drift.ExplainedBy(r.Code)
		at, inTime := r.seenAt(now)
		if !known || !inTime {
			continue
		}
		e := drift.Evidence{
			NodeID: nodeID, Part: part, Reason: reason, Source: drift.FromHost, ObservedAt: at,
			FreshUntil: at.Add(min(cmp.Or(max(r.Fresh, 0), hostFresh), hostFresh)),
			Detail:     r.text(),
		}
		if ids.Valid(r.CorrelationID) {
			e.CorrelationID = r.CorrelationID
		}
		over := func(since time.Time) {
			if since.Before(e.FreshUntil) {
				e.FreshUntil = since
			}
		}
		if !r.EndedAt.IsZero() {
			over(at)
		}
		if !heardAt.IsZero() && !at.After(heardAt) {
			over(heardAt)
		}
		if repeat := at.Add(max(hostRepeats, 2*r.NextRetry)); repeat.Before(newest) {
			over(repeat)
		}
		if old, found := best[part]; !found || worse(&e, &old, now) {
			best[part] = e
		}
	}
	out := make([]drift.Evidence, 0, len(best))
	for _, e := range best {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b drift.Evidence) int { return drift.CompareEvidence(&a, &b) })
	return out
}

// worse reports whether e counts for more than old, of the same part and host.
func worse(e, old *drift.Evidence, now time.Time) bool {
	if fresh := !e.Stale(now); fresh == old.Stale(now) {
		return fresh
	}
	if by := drift.CompareRank(e.Reason, old.Reason); by != 0 {
		return by > 0
	}
	return drift.CompareEvidence(old, e) < 0
}

// text returns the detail of the evidence: the code, what the host says, and who brought it; one clean line.
func (r *HostRecord) text() string {
	detail := strings.Map(func(c rune) rune {
		switch {
		case c == '\n' || c == '\r' || c == '\t':
			return ' '
		case unicode.IsControl(c) || unicode.Is(unicode.Cf, c):
			return -1
		}
		return c
	}, strings.ToValidUTF8(r.Detail[:min(len(r.Detail), MostDetail)], ""))
	text := names.Of(r.Code)
	if detail != "" {
		text += ": " + detail
	}
	if r.By != "" {
		text += " (brought by " + r.By + ")"
	}
	return text
}

// hostReported keeps what the record of the node's host is evidence of. The agent was heard last at the given time;
// zero: it never was.
func (n *Node) hostReported(records []HostRecord, now, heardAt time.Time, correlation string) {
	for _, e := range OfHost(n.NodeID, records, now, heardAt) {
		if e.CorrelationID == "" {
			e.CorrelationID = correlation
		}
		n.noteHost(e, now)
	}
}

// noteHost keeps evidence of the host in place of that of the same part, unless it is older, or says the same once more
// for about as long.
func (n *Node) noteHost(e drift.Evidence, now time.Time) {
	for _, old := range n.Evidence {
		if old.Part != e.Part || old.Source != e.Source {
			continue
		}
		same := old.Reason == e.Reason && old.Detail == e.Detail && old.Stale(now) == e.Stale(now)
		if same && (e.Stale(now) || e.FreshUntil.Sub(old.FreshUntil).Abs() < hostRenew) {
			return
		}
	}
	n.note(e, e.ObservedAt.UnixMilli())
}

// hostOver ends what the host's record was evidence of: the agent is heard since the given time.
func (n *Node) hostOver(since time.Time) {
	for _, e := range n.Evidence {
		if e.Source == drift.FromHost && (e.FreshUntil.IsZero() || e.FreshUntil.After(since)) {
			e.FreshUntil = since
		}
	}
}

// hostHeard ends what the host observed no later than its agent was heard last, at the given time: it did not keep the
// agent away.
func (n *Node) hostHeard(heardAt time.Time) {
	for _, e := range n.Evidence {
		if e.Source == drift.FromHost && !e.ObservedAt.After(heardAt) &&
			(e.FreshUntil.IsZero() || e.FreshUntil.After(heardAt)) {
			e.FreshUntil = heardAt
		}
	}
}

// heardAt returns when the agent was heard last, or since when it is, as far as is known.
func (n *Node) heardAt() time.Time {
	for _, e := range n.Evidence {
		if e.Heard() {
			return e.ObservedAt
		}
	}
	return time.Time{}
}

// RecordsOf returns the diagnostics of an event as records of a host.
func RecordsOf(list []*commonv1.Diagnostic) []HostRecord {
	out := make([]HostRecord, 0, len(list))
	for _, d := range list {
		r := HostRecord{
			Code: d.GetCode(), Detail: d.GetDetail(), NextRetry: min(d.GetNextRetry().AsDuration(), hostFresh),
			CorrelationID: d.GetRetryCorrelationId(),
		}
		if d.GetObservedAt().IsValid() {
			r.SeenAt = d.GetObservedAt().AsTime()
		}
		if d.GetEndedAt().IsValid() {
			r.EndedAt = d.GetEndedAt().AsTime()
		}
		out = append(out, r)
	}
	return out
}

// ReadClock reads the time by the database's clock.
var ReadClock = pg.Define(pg.RoleRecovery, "drift.read_clock", `SELECT mesh.clock()`)

// MergeHost keeps what the record of a host is evidence of, which a person brought or its agent returned, and has its
// node judged. It reports whether any evidence has changed, and the time by the database's clock. A node that is not
// known is a fault.
func MergeHost(ctx context.Context, tx pgx.Tx, nodeID string, records []HostRecord, correlation string) (bool,
	time.Time, error,
) {
	now, err := pg.Value[time.Time](ctx, tx, ReadClock)
	if err != nil {
		return false, now, fmt.Errorf("read clock: %w", err)
	}
	nodes := map[string]*Node{nodeID: {}}
	if err := Lock(ctx, tx, nodes); err != nil {
		return false, now, err
	}
	n := nodes[nodeID]
	if n == nil {
		return false, now, fault.NoSuch("node", nodeID)
	}
	n.hostReported(records, now, n.heardAt(), correlation)
	n.Due = n.news()
	if !n.Due {
		return false, now, nil
	}
	return true, now, Save(ctx, tx, nodes)
}
