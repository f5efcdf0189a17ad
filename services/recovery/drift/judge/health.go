package judge

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/drift"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// Proof is what is known about a node beside the reasons for which it may be unhealthy. Zero fields prove nothing.
type Proof struct {
	Evidence []drift.Evidence // about the node
	Beats    bool             // the replica of nodeapi that serves it beats
	// Instance is the present enrolment, Serial that of its current certificate. Trusted reports whether the ingress was
	// seen to trust that certificate's issuer, and Issuer says how that is known, or why not.
	Instance, Serial, Issuer string
	Trusted                  bool
	// Generation is that of the session, SessionSerial the certificate with which it was opened.
	Generation    int64
	SessionSerial string
	// The last no-op that completed since the last reason: in which enrolment and session, and when. Wanted reports
	// whether recovery asks for one, and Note what became of the one before.
	ProbeInstance   string
	ProbeGeneration int64
	ProbedAt        time.Time
	Wanted          bool
	Note            string
	TasksAt         time.Time // when no expired task counted as current
}

// HealthItem is whether one check is proven.
type HealthItem struct {
	Check      recoveryv1.HealthCheck
	Present    bool
	ObservedAt time.Time // of what proves it
	Detail     string
}

// Checklist returns the five items that prove a node healthy, in the order of the enum. An item has no age at which it
// ends: heartbeat and session hold while the session stands, issuer and serial until they change. A probe holds in the
// session in which it completed, and in later ones of the same enrolment until a reason is concluded, and so does the
// count of expired tasks. No time is before the present session: what was seen before it holds in it from its
// beginning, and the detail has when it was seen.
func Checklist(p Proof, now time.Time) []HealthItem {
	var opened, backlog *drift.Evidence
	for i := range p.Evidence {
		e := &p.Evidence[i]
		switch {
		case e.Stale(now):
		case e.Heard(): // not a topic of the process, which tells nothing of the session
			opened = e
		case e.Reason == commonv1.DriftReason_DRIFT_REASON_TASK_BACKLOG_STALE && e.Proves():
			backlog = e
		}
	}
	connected := drift.Heard(p.Evidence, now)
	var since time.Time
	if connected && opened != nil {
		since = opened.ObservedAt
	}
	return []HealthItem{
		heartbeatItem(p, connected, since), issuerItem(p, now), sessionItem(p, connected, since),
		probeItem(p, since), tasksItem(p, backlog, since),
	}
}

func heartbeatItem(p Proof, connected bool, since time.Time) HealthItem {
	out := HealthItem{Check: recoveryv1.HealthCheck_HEALTH_CHECK_HEARTBEAT}
	switch {
	case !connected:
		out.Detail = "no session serves it"
	case !p.Beats:
		out.Detail = "the replica of nodeapi that serves it does not beat"
	default:
		out.Present, out.ObservedAt = true, since
		out.Detail = fmt.Sprintf("session of generation %d is open and on time", p.Generation)
	}
	return out
}

func issuerItem(p Proof, now time.Time) HealthItem {
	out := HealthItem{Check: recoveryv1.HealthCheck_HEALTH_CHECK_ISSUER_TRUSTED, Detail: p.Issuer}
	switch {
	case p.Serial == "":
		out.Detail = "it has no current certificate"
	case p.Trusted:
		out.Present, out.ObservedAt = true, now
	}
	return out
}

func sessionItem(p Proof, connected bool, since time.Time) HealthItem {
	out := HealthItem{Check: recoveryv1.HealthCheck_HEALTH_CHECK_SESSION_ON_CURRENT_SERIAL}
	switch {
	case !connected:
		out.Detail = "no session serves it"
	case p.SessionSerial == "":
		out.Detail = "the certificate of its session is not known; the next session tells it"
	case p.SessionSerial != p.Serial:
		out.Detail = "its session was opened with certificate " + p.SessionSerial + "; the current one is " + p.Serial
	default:
		out.Present, out.ObservedAt = true, since
		out.Detail = fmt.Sprintf("session of generation %d was opened with certificate %s", p.Generation, p.Serial)
	}
	return out
}

// inSession returns the time from which what was seen at a time holds in a session; a zero session: there is none.
func inSession(at, session time.Time) time.Time {
	if session.After(at) {
		return session
	}
	return at
}

func probeItem(p Proof, since time.Time) HealthItem {
	out := HealthItem{Check: recoveryv1.HealthCheck_HEALTH_CHECK_PROBE_COMPLETED}
	switch {
	case p.ProbedAt.IsZero() || p.ProbeInstance != p.Instance || p.Instance == "":
		out.Detail = missing(p, unprobed(p))
	case p.ProbeGeneration != p.Generation:
		out.Present, out.ObservedAt = true, inSession(p.ProbedAt, since)
		out.Detail = fmt.Sprintf("a no-op completed in generation %d at %s, and no reason was concluded since",
			p.ProbeGeneration, p.ProbedAt.UTC().Format(time.RFC3339))
	default:
		out.Present, out.ObservedAt = true, p.ProbedAt
		out.Detail = fmt.Sprintf("a no-op completed in this session, of generation %d", p.Generation)
	}
	return out
}

func tasksItem(p Proof, backlog *drift.Evidence, since time.Time) HealthItem {
	out := HealthItem{Check: recoveryv1.HealthCheck_HEALTH_CHECK_NO_EXPIRED_TASK_CURRENT}
	switch {
	case backlog != nil:
		out.Detail = backlog.Detail
	case p.TasksAt.IsZero() || p.ProbeInstance != p.Instance:
		out.Detail = missing(p, "its tasks are counted with its next probe")
	default:
		out.Present, out.ObservedAt, out.Detail = true, inSession(p.TasksAt, since), "lifecycle had none"
		if since.After(p.TasksAt) {
			out.Detail += " at " + p.TasksAt.UTC().Format(time.RFC3339) + ", and has reported none since"
		}
	}
	return out
}

// unprobed returns why no probe counts while recovery does not ask for one.
func unprobed(p Proof) string {
	switch {
	case p.Instance != "" && p.ProbeInstance == p.Instance:
		return "its last no-op does not count since a reason was concluded; recovery asks for one when none holds any more"
	case p.Note != "":
		return p.Note + "; recovery asks for one in its next session"
	}
	return "no no-op has completed since it enrolled; recovery asks for one once it is connected and no reason holds"
}

// missing returns the detail of an item that a probe brings.
func missing(p Proof, otherwise string) string {
	switch {
	case !p.Wanted:
		return otherwise
	case p.Note != "":
		return p.Note + "; recovery asks again"
	}
	return "recovery asks lifecycle for a no-op as soon as heartbeat, issuer and session are there"
}

// health is the checklist of a node, and what follows from it.
type health struct {
	items  []HealthItem
	heard  bool // the heartbeat is current
	ready  bool // all that a probe needs is there
	proven bool // it is healthy
}

// Healthy reports whether a verdict and a checklist prove a node healthy: no reason holds, and every item is present.
func Healthy(v drift.Verdict, items []HealthItem) bool {
	for _, item := range items {
		if !item.Present {
			return false
		}
	}
	return v.Reason == 0 && len(items) == len(recoveryv1.HealthCheck_name)-1
}

func (t *takenNodes) healthOf(n *collect.Node, v drift.Verdict, evidence []drift.Evidence) health {
	p := proofOf(n, evidence)
	p.Beats = t.seen.beats(n.ReplicaID)
	p.Trusted, p.Issuer = t.trust.of(n.Issuer, t.seen)
	items := Checklist(p, t.seen.Now)
	h := health{items: items, heard: items[0].Present, proven: Healthy(v, items)}
	h.ready = v.Reason == 0 && n.State == collect.ActiveState && h.heard && items[1].Present && items[2].Present
	return h
}

// beats reports whether a replica of nodeapi beats, as far as the round has seen.
func (s *seen) beats(replicaID string) bool {
	return s.Lives && replicaID != "" && !slices.Contains(s.Lost, replicaID)
}

// changes reports whether being healthy begins or ends with h. That a node is not heard is a fact that readers see by
// themselves, and not its end: one that connects again, and of which nothing was concluded meanwhile, is no event.
func (h health) changes(was *recoveryv1.NodeVerdict) bool {
	if h.items == nil || h.proven == (was.GetHealthySince() != nil) {
		return false
	}
	return h.proven || h.heard
}

func itemMessages(items []HealthItem) []*recoveryv1.HealthItem {
	var out []*recoveryv1.HealthItem
	for _, item := range items {
		m := &recoveryv1.HealthItem{Check: item.Check, Present: item.Present, Detail: item.Detail}
		if item.Present {
			m.ObservedAt = timestamppb.New(item.ObservedAt)
		}
		out = append(out, m)
	}
	return out
}
