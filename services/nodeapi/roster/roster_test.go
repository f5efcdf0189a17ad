package roster

import (
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// wire is an agent's side of a session: it records the frames that are sent, and may stop taking them.
type wire struct {
	mu     sync.Mutex
	sent   []*nodev1.ConnectResponse
	closed chan struct{}
	stuck  chan struct{} // non-nil: Send waits for it or for the end
	once   sync.Once
}

func (w *wire) Send(f *nodev1.ConnectResponse) error {
	if w.stuck != nil {
		select {
		case <-w.stuck:
		case <-w.closed:
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = append(w.sent, f)
	return nil
}

func (w *wire) Close() error {
	w.once.Do(func() { close(w.closed) })
	return nil
}

func (w *wire) isClosed() bool {
	select {
	case <-w.closed:
		return true
	default:
		return false
	}
}

func (w *wire) last() *nodev1.ConnectResponse {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.sent) == 0 {
		return nil
	}
	return w.sent[len(w.sent)-1]
}

type facts struct {
	mu   sync.Mutex
	seen []*nodev1.SessionChanged
}

func (f *facts) Session(s *nodev1.SessionChanged, _ string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seen = append(f.seen, s)
}

func (f *facts) late() []bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []bool
	for _, s := range f.seen {
		out = append(out, s.GetLate())
	}
	return out
}

// admitted makes a session of an hour with a certificate of eight.
func admitted(r *Roster, stuck chan struct{}) (*Session, *wire) {
	w := &wire{closed: make(chan struct{}), stuck: stuck}
	now := time.Now()
	s := r.Add("session", Identity{NodeID: "node", Serial: "1", NotAfter: now.Add(8 * time.Hour), Conn: w}, w,
		now.Add(5*time.Second), now.Add(time.Hour))
	r.Opening(s)
	s.Welcomed("instance", 1, 1, "nonce", "", AgentFacts{})
	r.Admit(s)
	return s, w
}

// in runs f in a synctest bubble with a running roster.
func in(t *testing.T, cfg Config, f func(r *Roster, events *facts)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		events := &facts{}
		r := New(slog.New(slog.DiscardHandler), cfg, events)
		ctx := t.Context()
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		f(r, events)
		r.Wait()
	})
}

func TestSilenceIsAFactAndItsEndToo(t *testing.T) {
	in(t, Config{}, func(r *Roster, events *facts) {
		s, w := admitted(r, nil)
		s.SetInterval(30 * time.Second)
		time.Sleep(89 * time.Second)
		if got := events.late(); len(got) != 1 {
			t.Errorf("late before three intervals: %v", got)
		}
		time.Sleep(3 * time.Second)
		s.Seen(time.Now())
		time.Sleep(time.Second)
		if got := events.late(); len(got) != 3 || !got[1] || got[2] {
			t.Errorf("facts of lateness %v", got)
		}
		if w.isClosed() {
			t.Error("silence closed the session")
		}
		r.Remove(s)
	})
}

// Scenario: a session ends while the roster finds that it is late. No fact after that of its end shows it as admitted.
func TestNoFactTakesAnEndedSessionBack(t *testing.T) {
	events := &facts{}
	var end func() // called once, after the roster has read the state of the session
	r := New(slog.New(slog.DiscardHandler), Config{StaleAfter: func() time.Duration {
		if end != nil {
			end()
		}
		return time.Hour
	}}, events)
	s, _ := admitted(r, nil)
	end = sync.OnceFunc(func() { r.Remove(s) })
	r.Tick(time.Now().Add(time.Minute))
	r.Wait()
	const closed = commonv1.SessionState_SESSION_STATE_CLOSED
	last := events.seen[len(events.seen)-1]
	for _, f := range events.seen {
		if f.GetVersion() > last.GetVersion() {
			last = f
		}
	}
	if last.GetState() != closed || last.GetClosedAt() == nil {
		t.Errorf("the last of %d facts shows the session as %s", len(events.seen), last.GetState())
	}
}

// TestATighterBoundCountsFromWhenItIsSent: an agent that sends every 15 s is not late at once when the policy
// wants to hear of it every 6 s, and late when it sends nothing for 6 s from then on.
func TestATighterBoundCountsFromWhenItIsSent(t *testing.T) {
	var bound atomic.Int64
	bound.Store(int64(15 * time.Minute))
	in(t, Config{StaleAfter: func() time.Duration { return time.Duration(bound.Load()) }}, func(r *Roster, events *facts) {
		s, w := admitted(r, nil)
		s.SetInterval(15 * time.Second)
		time.Sleep(14 * time.Second)
		bound.Store(int64(6 * time.Second))
		time.Sleep(2 * time.Second) // the policy is read here, and the agent not told yet
		s.SetInterval(3 * time.Second)
		time.Sleep(5 * time.Second)
		if got := events.late(); len(got) != 1 {
			t.Errorf("late before the agent could follow: %v", got)
		}
		time.Sleep(3 * time.Second)
		if got := events.late(); len(got) != 2 || !got[1] {
			t.Errorf("facts of lateness %v, want one that it is", got)
		}
		s.Close(nil)
		<-w.closed
	})
}

// TestSessionsThatStandAreRepeated checks that Repeat reports each session that was admitted as a newer version in the
// state that it has, and none that is opening.
func TestSessionsThatStandAreRepeated(t *testing.T) {
	in(t, Config{}, func(r *Roster, events *facts) {
		s, w := admitted(r, nil)
		now := time.Now()
		opening := r.Add("other", Identity{NodeID: "other", Conn: w}, w, now.Add(time.Second), now.Add(time.Hour))
		before := events.seen[len(events.seen)-1]
		r.Repeat()
		if len(events.seen) != 2 {
			t.Fatalf("%d facts, want two", len(events.seen))
		}
		if f := events.seen[1]; f.GetSessionId() != s.ID || f.GetVersion() <= before.GetVersion() || f.GetLate() ||
			f.GetState() != commonv1.SessionState_SESSION_STATE_ADMITTED || f.GetReplicaId() != before.GetReplicaId() {
			t.Errorf("repeated %v", f)
		}
		r.Remove(opening)
		r.Remove(s)
		r.Repeat()
		if n := len(events.seen); n != 3 {
			t.Errorf("%d facts, want three: a session that has ended is not repeated", n)
		}
	})
}

func TestOldSessionIsReplacedOrEnds(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		s, w := admitted(r, nil)
		time.Sleep(time.Hour + time.Second)
		if got := w.last().GetReconnect().GetReason(); got != commonv1.Reason_REASON_STREAM_MAX_AGE {
			t.Errorf("asked to reconnect because of %s", got)
		}
		time.Sleep(time.Minute)
		if w.isClosed() {
			t.Error("closed before its agent could be replaced")
		}
		time.Sleep(time.Minute)
		if got := w.last().GetDenied().GetReason(); !w.isClosed() || got != commonv1.Reason_REASON_STREAM_MAX_AGE {
			t.Errorf("closed %t, because of %s", w.isClosed(), got)
		}
		r.Remove(s)
	})
}

// TestCertificateEndsByTheDatabasesClock runs on a host whose clock is two hours behind.
func TestCertificateEndsByTheDatabasesClock(t *testing.T) {
	in(t, Config{Offset: func() time.Duration { return 2 * time.Hour }}, func(r *Roster, _ *facts) {
		w := &wire{closed: make(chan struct{})}
		now := time.Now()
		s := r.Add("session", Identity{NodeID: "node", NotAfter: now.Add(8 * time.Hour), Conn: w}, w, now,
			now.Add(24*time.Hour))
		s.Welcomed("instance", 1, 1, "nonce", "", AgentFacts{})
		r.Admit(s)
		s.SetWorkReady()
		time.Sleep(6*time.Hour - time.Second)
		if w.isClosed() || !s.MayLease() {
			t.Error("ended before its certificate")
		}
		time.Sleep(2 * time.Second)
		if got := w.last().GetDenied().GetReason(); !w.isClosed() || got != commonv1.Reason_REASON_CERTIFICATE_EXPIRED ||
			s.MayLease() {
			t.Errorf("closed %t, because of %s", w.isClosed(), got)
		}
		r.Remove(s)
	})
}

// TestFactsHaveTheDatabasesClock runs on a host whose clock is five minutes ahead of the database's: by the host's
// clock a node that fell silent would seem to have been seen until five minutes after its last frame.
func TestFactsHaveTheDatabasesClock(t *testing.T) {
	const ahead = 5 * time.Minute
	in(t, Config{Offset: func() time.Duration { return -ahead }}, func(r *Roster, _ *facts) {
		s, _ := admitted(r, nil)
		time.Sleep(3 * time.Second)
		s.Seen(time.Now())
		f := s.Fact(commonv1.SessionState_SESSION_STATE_CLOSED, false)
		now := time.Now().Add(-ahead)
		if got := f.GetOpenedAt().AsTime(); !got.Equal(now.Add(-3 * time.Second)) {
			t.Errorf("opened at %s, %s from now", got, got.Sub(now))
		}
		for name, at := range map[string]time.Time{"seen": f.GetLastSeenAt().AsTime(), "closed": f.GetClosedAt().AsTime()} {
			if !at.Equal(now) {
				t.Errorf("%s at %s, %s from now", name, at, at.Sub(now))
			}
		}
		r.Remove(s)
	})
}

// TestStuckAgentIsCut: one frame that is not taken for ten seconds ends the session, though nothing else waits.
func TestStuckAgentIsCut(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		s, w := admitted(r, make(chan struct{}))
		s.Send(&nodev1.ConnectResponse{})
		time.Sleep(9 * time.Second)
		if w.isClosed() {
			t.Error("cut too soon")
		}
		time.Sleep(2 * time.Second)
		if !w.isClosed() || s.MayLease() {
			t.Error("not cut")
		}
		r.Remove(s)
	})
}

// Scenario: a handler ends while the last frame is on its way. The connection stays until it is sent, for the stream's
// status comes after it; a peer that takes nothing is cut after a moment.
func TestTheLastFrameIsSentBeforeTheEnd(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		stuck := make(chan struct{})
		s, w := admitted(r, stuck)
		s.Send(&nodev1.ConnectResponse{})
		synctest.Wait()
		time.AfterFunc(lastFrames/2, func() { close(stuck) })
		r.Remove(s)
		if w.isClosed() || w.last() == nil {
			t.Error("cut in the middle of a frame")
		}

		s, w = admitted(r, make(chan struct{}))
		s.Send(&nodev1.ConnectResponse{})
		synctest.Wait()
		began := time.Now()
		r.Remove(s)
		if took := time.Since(began); !w.isClosed() || took != lastFrames {
			t.Errorf("closed %t after %s", w.isClosed(), took)
		}
	})
}

// TestWhatIsQueuedIsSentBeforeTheEnd checks that a handler that ends while another goroutine writes leaves nothing of
// the queue behind but offers: its denial is the last frame. A peer that takes nothing is cut after a moment
// nevertheless.
func TestWhatIsQueuedIsSentBeforeTheEnd(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		denied := &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: &commonv1.Denial{}}}
		stuck := make(chan struct{})
		s, w := admitted(r, stuck)
		s.Send(&nodev1.ConnectResponse{})
		synctest.Wait()
		s.SendInline(denied)
		s.SendInline(&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_TaskOffer{TaskOffer: &nodev1.TaskOffer{}}})
		time.AfterFunc(lastFrames/2, func() { close(stuck) })
		r.Remove(s)
		if w.isClosed() || w.last() != denied {
			t.Errorf("closed %t, and the last frame is %v", w.isClosed(), w.last())
		}
		if s.SendInline(&nodev1.ConnectResponse{}); w.last() != denied || s.MayLease() {
			t.Error("a session that has ended sends")
		}

		s, w = admitted(r, make(chan struct{}))
		s.Send(&nodev1.ConnectResponse{})
		synctest.Wait()
		s.SendInline(denied)
		began := time.Now()
		r.Remove(s)
		if took := time.Since(began); !w.isClosed() || took != lastFrames || w.last() == denied {
			t.Errorf("closed %t after %s", w.isClosed(), took)
		}
	})
}

func TestUnopenedSessionIsClosed(t *testing.T) {
	in(t, Config{}, func(r *Roster, events *facts) {
		w := &wire{closed: make(chan struct{})}
		now := time.Now()
		s := r.Add("session", Identity{NodeID: "node", NotAfter: now.Add(time.Hour), Conn: w}, w, now.Add(5*time.Second),
			now.Add(time.Hour))
		time.Sleep(6 * time.Second)
		if got := w.last().GetDenied().GetReason(); !w.isClosed() || got != commonv1.Reason_REASON_DEADLINE_EXCEEDED {
			t.Errorf("closed %t, because of %s", w.isClosed(), got)
		}
		r.Remove(s)
		if len(events.late()) != 0 {
			t.Error("a session that never was has facts")
		}
	})
}

// TestAdmissionsThatCrossLeaveTheNewerSession: the older one's admission comes last, and it is the older one that ends.
func TestAdmissionsThatCrossLeaveTheNewerSession(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		made := func(id string, generation int64) (*Session, *wire) {
			w := &wire{closed: make(chan struct{})}
			now := time.Now()
			s := r.Add(id, Identity{NodeID: "node", Serial: id, NotAfter: now.Add(8 * time.Hour), Conn: w}, w,
				now.Add(5*time.Second), now.Add(time.Hour))
			r.Opening(s)
			s.Welcomed("instance", generation, 1, id, "", AgentFacts{})
			return s, w
		}
		older, olderWire := made("older", 1)
		newer, newerWire := made("newer", 2)
		r.Admit(newer)
		r.Admit(older)
		time.Sleep(time.Minute)
		if r.Current("node") != newer || newerWire.isClosed() {
			t.Error("the newer session was replaced by an older one")
		}
		if got := olderWire.last().GetDenied().GetReason(); !olderWire.isClosed() ||
			got != commonv1.Reason_REASON_SESSION_SUPERSEDED {
			t.Errorf("the older session: closed %t, because of %s", olderWire.isClosed(), got)
		}
		r.Remove(older)
		r.Remove(newer)
	})
}

// TestPolicyBoundsSilence: a silence is late when the policy says so, whatever the interval of the fleet.
func TestPolicyBoundsSilence(t *testing.T) {
	in(t, Config{StaleAfter: func() time.Duration { return 10 * time.Second }}, func(r *Roster, events *facts) {
		s, _ := admitted(r, nil)
		s.SetInterval(30 * time.Second)
		time.Sleep(12 * time.Second)
		if got := events.late(); len(got) != 2 || !got[1] {
			t.Errorf("facts of lateness %v", got)
		}
		r.Remove(s)
	})
}

// TestShortCertificatesAreReplacedInTime asks for the replacement of a session a sixth of its certificate's life
// before its end, at most a minute.
func TestShortCertificatesAreReplacedInTime(t *testing.T) {
	tests := map[string]struct{ life, lead, spread time.Duration }{
		"the policy's least": {20 * time.Second, 20 * time.Second / 6, 20 * time.Second / 36},
		"half a minute":      {30 * time.Second, 5 * time.Second, 5 * time.Second / 6},
		"six minutes":        {6 * time.Minute, time.Minute, 10 * time.Second},
		"eight hours":        {8 * time.Hour, time.Minute, 10 * time.Second},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			in(t, Config{}, func(r *Roster, _ *facts) {
				w := &wire{closed: make(chan struct{})}
				now := time.Now()
				end := now.Add(tt.life)
				s := r.Add("session", Identity{NodeID: "node", NotAfter: end, Life: tt.life, Conn: w}, w, now,
					now.Add(24*time.Hour))
				s.Welcomed("instance", 1, 1, "nonce", "", AgentFacts{})
				r.Admit(s)
				const tick = 250 * time.Millisecond
				time.Sleep(tt.life - tt.lead - tick)
				if got := w.last(); got != nil {
					t.Fatalf("asked %v before its end for %v", time.Until(end), got)
				}
				time.Sleep(3 * tick)
				got := w.last().GetReconnect()
				if got.GetReason() != commonv1.Reason_REASON_STREAM_MAX_AGE || got.GetSpread().AsDuration() != tt.spread {
					t.Errorf("%v before its end it was asked for %v, want a spread of %v", time.Until(end), got, tt.spread)
				}
				r.Remove(s)
			})
		})
	}
}

// TestSilenceIsElapsedTime: silence is measured by the monotonic clock, so that a step of the host's clock makes no
// session late, or on time.
func TestSilenceIsElapsedTime(t *testing.T) {
	r := New(slog.New(slog.DiscardHandler), Config{}, &facts{}) // not in a bubble, whose clock has no monotonic reading
	s, _ := admitted(r, nil)
	for range 2 {
		if at := s.LastSeen(); !strings.Contains(at.String(), " m=") {
			t.Errorf("the session was last seen at %s, which has no monotonic reading", at)
		}
		s.Seen(time.Now())
	}
	r.Remove(s)
	r.Wait()
}

// TestADecisionThatLeavesNoGenerationConfirmedEndsASession: a node was enrolled anew on another host, or a hold for a
// lost join state and its reactivation were one change of this replica's view. Both leave no generation confirmed. The
// session of before ends; one that was opened since, and is not confirmed yet, does not.
func TestADecisionThatLeavesNoGenerationConfirmedEndsASession(t *testing.T) {
	for _, tt := range []struct {
		name     string
		instance string
		issued   int64
		fence    int64
		want     commonv1.Reason
	}{
		{"enrolled anew", "another", 1, 2, commonv1.Reason_REASON_SESSION_SUPERSEDED},
		{"reactivated", "instance", 1, 2, commonv1.Reason_REASON_SESSION_UNKNOWN},
		{"reactivated, with a Welcome that no Ready followed", "instance", 2, 2, commonv1.Reason_REASON_SESSION_UNKNOWN},
		{"opened since", "instance", 1, 1, commonv1.Reason_REASON_UNSPECIFIED},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in(t, Config{}, func(r *Roster, _ *facts) {
				s, w := admitted(r, nil)
				r.OnAuthority(&recoveryv1.NodeAuthority{
					NodeId: "node", NodeInstanceId: tt.instance, State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
					NextSerial: "1", Issued: tt.issued, FenceEpoch: tt.fence,
				})
				time.Sleep(2 * time.Second)
				got := w.last().GetDenied().GetReason()
				if w.isClosed() != (tt.want != commonv1.Reason_REASON_UNSPECIFIED) || got != tt.want {
					t.Errorf("closed %t, because of %s; want %s", w.isClosed(), got, tt.want)
				}
				r.Remove(s)
			})
		})
	}
}

// TestASessionFromBeforeAFenceEnds: a node was fenced and reactivated before this replica heard of the fence. Its
// session does not count any more, and is offered no work: it ends, and the agent opens another one.
func TestASessionFromBeforeAFenceEnds(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		s, w := admitted(r, nil)
		decided := &recoveryv1.NodeAuthority{
			NodeId: "node", NodeInstanceId: "instance", State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
			CurrentSerial: "1", Issued: 1, Confirmed: 1, ConfirmedSessionId: "session",
		}
		r.OnAuthority(decided)
		time.Sleep(time.Second)
		if w.isClosed() {
			t.Error("a session that counts was closed")
		}
		decided.ConfirmedSessionId = ""
		r.OnAuthority(decided)
		time.Sleep(2 * time.Second)
		if got := w.last().GetDenied().GetReason(); !w.isClosed() || got != commonv1.Reason_REASON_SESSION_UNKNOWN {
			t.Errorf("a session that a decision ended: closed %t, because of %s", w.isClosed(), got)
		}
		r.Remove(s)
	})
}
