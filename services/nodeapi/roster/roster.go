// Package roster knows which sessions stand on this replica. It owns the ends of sessions: it closes a session whose
// node recovery fenced, that was replaced, that reached its maximum age, whose certificate expired, or that did not
// finish opening in time. It decides nothing about identity.
//
// Guarantees: at most one session of a node is the current one here; a session that is closed is cut from its
// connection within the grace, whether its agent hangs up or not; heartbeats touch memory only.
package roster

import (
	"context"
	"log/slog"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Config of the roster. Zero fields take the defaults.
type Config struct {
	ReplicaID  string
	OpenWithin time.Duration // from the stream's start to admission; default 5 s for the first frame, 30 s in all
	// LateAfter is how long a session may be without a frame before it is late, at least; default 45 s, and never less
	// than three of the session's heartbeat intervals.
	LateAfter time.Duration
	DrainFor  time.Duration // of a replaced session; default 30 s
	// ReplaceLead is how long before the certificate's end a replacement is asked for, at most; less of a certificate
	// that lives for less than six times that. Default 60 s.
	ReplaceLead time.Duration
	WriteWithin time.Duration // a frame that the agent does not take for longer ends its session; default 10 s
	// Offset returns the database's clock minus this host's. Certificates expire by the database's clock. Nil: zero.
	Offset func() time.Duration
	// StaleAfter returns the policy's bound of silence: a session that has sent nothing for this long is late, whatever
	// its heartbeat interval. It is read when an interval is sent to the agent (Session.SetInterval). Nil: no bound.
	StaleAfter func() time.Duration
}

// Events receives the transitions of sessions. It must not block.
type Events interface {
	// Session takes a session as an event reports it, and the correlation id of the event; empty: none.
	Session(f *nodev1.SessionChanged, correlationID string)
}

// Roster of sessions. Safe for concurrent use.
type Roster struct {
	cfg       Config
	replicaID string
	logger    *slog.Logger
	events    Events
	wg        sync.WaitGroup
	nudged    chan struct{}

	mu     sync.Mutex
	all    map[*Session]struct{}
	byNode map[string][]*Session
	// current is the admitted session of each node.
	current map[string]*Session
	empty   chan struct{} // closed when the last session leaves while draining
	closing bool
	lateNow int
}

var defaults = Config{
	OpenWithin: 30 * time.Second, LateAfter: 45 * time.Second, DrainFor: 30 * time.Second, ReplaceLead: time.Minute,
	WriteWithin: 10 * time.Second,
	Offset:      func() time.Duration { return 0 }, StaleAfter: func() time.Duration { return math.MaxInt64 },
}

// New makes a roster.
func New(logger *slog.Logger, cfg Config, events Events) *Roster {
	cfg = config.Or(cfg, defaults)
	return &Roster{
		cfg: cfg, replicaID: cfg.ReplicaID, logger: logger, events: events, nudged: make(chan struct{}, 1),
		all: map[*Session]struct{}{}, byNode: map[string][]*Session{}, current: map[string]*Session{},
	}
}

// Go runs a goroutine that the roster waits for at its end.
func (r *Roster) Go(f func()) { r.wg.Go(f) }

// Add registers a session that is opening. Its Hello must have come by firstFrameBy.
func (r *Roster) Add(id string, ident Identity, stream Stream, firstFrameBy, retireAt time.Time) *Session {
	now := wallclock.Now()
	s := &Session{
		ID: id, Identity: ident, OpenedAt: now, openedDB: now.Add(r.cfg.Offset()), RetireAt: retireAt, roster: r,
		stream: stream, openBy: firstFrameBy,
	}
	s.Seen(now)
	s.state.Store(int32(commonv1.SessionState_SESSION_STATE_OPENING))
	r.mu.Lock()
	r.all[s] = struct{}{}
	r.byNode[ident.NodeID] = append(r.byNode[ident.NodeID], s)
	r.mu.Unlock()
	return s
}

// Opening extends the time of a session whose Hello has come.
func (r *Roster) Opening(s *Session) {
	s.mu.Lock()
	s.openBy = s.OpenedAt.Add(r.cfg.OpenWithin)
	s.mu.Unlock()
}

// Remove is called by a session's handler when it ends. It waits until nothing sends on the stream.
func (r *Roster) Remove(s *Session) {
	s.finish()
	was := commonv1.SessionState(s.state.Swap(int32(commonv1.SessionState_SESSION_STATE_CLOSED)))
	r.mu.Lock()
	delete(r.all, s)
	node := s.Identity.NodeID
	r.byNode[node] = slices.DeleteFunc(r.byNode[node], func(other *Session) bool { return other == s })
	if len(r.byNode[node]) == 0 {
		delete(r.byNode, node)
	}
	if r.current[node] == s {
		delete(r.current, node)
	}
	if r.closing && len(r.all) == 0 && r.empty != nil {
		close(r.empty)
		r.empty = nil
	}
	r.mu.Unlock()
	if was == commonv1.SessionState_SESSION_STATE_ADMITTED || was == commonv1.SessionState_SESSION_STATE_DRAINING {
		r.report(s, commonv1.SessionState_SESSION_STATE_CLOSED, false)
	}
}

// Admit makes s the current session of its node and ends the one before it: by a drain if s named it, else at once. If
// a session of a higher generation was admitted meanwhile, it is s that ends.
func (r *Roster) Admit(s *Session) {
	generation := s.Generation()
	r.mu.Lock()
	old := r.current[s.Identity.NodeID]
	// Generation takes the session's lock under the roster's. No session takes the roster's lock while it holds its own,
	// so this cannot deadlock.
	if old != nil && old != s && old.Generation() > generation {
		r.mu.Unlock()
		r.replace(s, "")
		return
	}
	r.current[s.Identity.NodeID] = s
	r.mu.Unlock()
	s.mu.Lock()
	s.openBy = time.Time{}
	replaces := s.replaces
	s.mu.Unlock()
	s.state.CompareAndSwap(int32(commonv1.SessionState_SESSION_STATE_OPENING),
		int32(commonv1.SessionState_SESSION_STATE_ADMITTED))
	r.report(s, commonv1.SessionState_SESSION_STATE_ADMITTED, true)
	s.helloReported()
	if old != nil && old != s {
		r.replace(old, replaces)
	}
}

// replace ends an older session of a node whose newer one was admitted.
func (r *Roster) replace(old *Session, replacedNonce string) {
	if replacedNonce == "" || old.Nonce() != replacedNonce {
		old.Close(&commonv1.Denial{
			Reason: commonv1.Reason_REASON_SESSION_SUPERSEDED, Action: commonv1.Action_ACTION_WAIT,
			Message: "another session of this node was admitted", Remedy: "reconnect within two seconds",
		})
		return
	}
	if !old.state.CompareAndSwap(int32(commonv1.SessionState_SESSION_STATE_ADMITTED),
		int32(commonv1.SessionState_SESSION_STATE_DRAINING)) {
		return
	}
	old.mu.Lock()
	old.closeLocked(commonv1.Reason_REASON_SESSION_SUPERSEDED, "replaced by its own agent",
		wallclock.Now().Add(r.cfg.DrainFor))
	old.mu.Unlock()
	r.report(old, commonv1.SessionState_SESSION_STATE_DRAINING, false)
}

// report reports a session in a state.
func (r *Roster) report(s *Session, state commonv1.SessionState, withHost bool) {
	r.events.Session(s.Fact(state, withHost), s.Correlation())
}

// RepeatClosed reports the end of a session once more, as a newer version.
func (r *Roster) RepeatClosed(s *Session) {
	r.report(s, commonv1.SessionState_SESSION_STATE_CLOSED, false)
}

// Repeat reports the sessions that stand here once more, as newer versions. A replica that comes back after it counted
// as gone calls it: nodes may have been judged silent meanwhile, and a session that goes on reports nothing by itself.
func (r *Roster) Repeat() {
	for _, s := range r.CurrentAll() {
		if state := s.State(); state != commonv1.SessionState_SESSION_STATE_OPENING { // Admit reports such a one
			r.report(s, state, false)
		}
	}
}

// Current returns the admitted session of a node, nil if there is none here.
func (r *Roster) Current(nodeID string) *Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current[nodeID]
}

// CurrentAll lists the admitted sessions.
func (r *Roster) CurrentAll() []*Session {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.current))
}

// Counts returns how many sessions stand here, and how many of them are late.
func (r *Roster) Counts() (int, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.current), r.lateNow
}

// Open returns how many streams stand here, admitted or not.
func (r *Roster) Open() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.all)
}

func (r *Roster) nudge() {
	select {
	case r.nudged <- struct{}{}:
	default:
	}
}

// Run applies the deadlines of all sessions until ctx ends. It uses one ticker instead of a timer for each session.
func (r *Roster) Run(ctx context.Context) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-r.nudged:
		case <-ctx.Done():
			return nil
		}
		r.Tick(wallclock.Now())
	}
}

// Tick applies the deadlines that are due at now.
func (r *Roster) Tick(now time.Time) {
	r.mu.Lock()
	sessions := slices.Collect(maps.Keys(r.all))
	r.mu.Unlock()
	late := 0
	for _, s := range sessions {
		if r.tickOne(s, now) {
			late++
		}
	}
	r.mu.Lock()
	r.lateNow = late
	r.mu.Unlock()
}

func (r *Roster) tickOne(s *Session, now time.Time) bool {
	state := s.State()
	dbNow := now.Add(r.cfg.Offset())
	stale := r.cfg.StaleAfter()
	s.mu.Lock()
	if s.bound > 0 {
		stale = s.bound
	}
	if s.cutAt.IsZero() && !s.writingSince.IsZero() && now.Sub(s.writingSince) > r.cfg.WriteWithin {
		s.closeLocked(commonv1.Reason_REASON_SLOW_CONSUMER, "the agent does not read what it is sent", now)
	}
	cut := !s.cutAt.IsZero() && !now.Before(s.cutAt)
	// A session that was opened within the lead is itself the replacement that was asked for: its agent has no later
	// certificate yet.
	lead := r.lead(s)
	due := s.Identity.NotAfter.Add(-lead)
	endsSoon := dbNow.After(due) && s.OpenedAt.Add(r.cfg.Offset()).Before(due)
	overdue := !s.openBy.IsZero() && now.After(s.openBy) && s.cutAt.IsZero()
	wasLate := s.late
	isLate := state == commonv1.SessionState_SESSION_STATE_ADMITTED &&
		s.silentLocked(now) > min(max(r.cfg.LateAfter, 3*s.interval), stale)
	s.late = isLate
	retire := state == commonv1.SessionState_SESSION_STATE_ADMITTED && !s.retiring &&
		(now.After(s.RetireAt) || endsSoon)
	if retire {
		s.retiring = true
	}
	expired := s.cutAt.IsZero() && dbNow.After(s.Identity.NotAfter)
	tooOld := s.cutAt.IsZero() && now.After(s.RetireAt.Add(2*time.Minute))
	s.mu.Unlock()
	switch {
	case cut:
		_ = s.Identity.Conn.Close()
	case overdue:
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_DEADLINE_EXCEEDED, "the session was not opened in time"), ""))
	case expired:
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_CERTIFICATE_EXPIRED,
			"the certificate of this session has run out"), ""))
	case tooOld:
		s.Close(fault.ToDenial(fault.New(commonv1.Reason_REASON_STREAM_MAX_AGE,
			"the session is too old and was not replaced"), ""))
	case retire:
		spread := replaceSpread
		if endsSoon {
			spread = min(spread, lead/6)
		}
		s.AskReconnect(commonv1.Reason_REASON_STREAM_MAX_AGE, spread)
	}
	if isLate != wasLate {
		r.report(s, state, false)
	}
	return isLate
}
