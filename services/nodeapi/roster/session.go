package roster

import (
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Stream is the sending half of an agent's stream.
type Stream interface {
	Send(*nodev1.ConnectResponse) error
}

// Identity is the content of a connection's verified certificate, with the connection and its remote address.
type Identity struct {
	NodeID   string
	Serial   string
	NotAfter time.Time
	Life     time.Duration // of the certificate, from its issue; zero: unknown
	Remote   string
	Conn     io.Closer // the raw connection: closing it is the only way to end a stream whose peer does not
}

// outboxLimit and outboxBytes bound what may wait for a slow agent. Past either bound the session is closed, so that a
// slow agent does not exhaust this replica's memory.
const (
	outboxLimit = 512
	outboxBytes = 4 << 20
)

// Session is one agent's stream on this replica. It costs no goroutine of its own while it is idle: its handler reads,
// and a writer lives only while something waits to be sent.
type Session struct {
	ID       string
	Identity Identity
	OpenedAt time.Time // by this host's clock
	// RetireAt is when the session has reached its maximum age.
	RetireAt time.Time

	roster *Roster
	stream Stream
	// openedDB is OpenedAt by the database's clock, as events report it.
	openedDB time.Time

	lastSeen atomic.Int64 // nanoseconds from OpenedAt to the last frame, by the monotonic clock
	refused  atomic.Int64 // reports of tasks that lifecycle did not take
	state    atomic.Int32 // commonv1.SessionState

	mu       sync.Mutex
	cond     *sync.Cond // the writer has ended; created by the first wait
	out      []*nodev1.ConnectResponse
	outBytes int
	writing  bool
	// writingSince is when the frame under way was begun; zero: none is.
	writingSince time.Time
	interval     time.Duration // of heartbeats, as sent to the agent
	bound        time.Duration // of silence, by the policy that was sent to the agent last; zero: none was sent
	boundAt      time.Time     // when bound or interval was last shortened: silence counts from then on
	gone         bool
	ending       bool      // gone, and what is queued is still sent
	cutAt        time.Time // when the connection is closed for good
	openBy       time.Time // when it must have been admitted
	late         bool
	workReady    bool
	retiring     bool
	generation   int64
	fence        int64 // the node's fence epoch at the opening
	nonce        string
	replaces     string
	instanceID   string
	agent        keptFacts
	hello        *AgentFacts // until they were reported
	profile      profileOf
	clockOffset  time.Duration          // of the host's clock, as last reported; zero: none is known
	diags        []*commonv1.Diagnostic // keptDiagnostics of Hello's, once they were reported, and of the reports since
	version      int64
	correlation  string // of the recovery action that brought its certificate; empty: none did
	closeWhy     commonv1.Reason
	closeText    string
}

// AgentFacts are the facts of the agent in its Hello.
type AgentFacts struct {
	Version  string
	Protocol int32
	LedgerID string
	BootID   string
	Host     *commonv1.HostFacts
	Profile  *commonv1.ProfileFacts
	Diags    []*commonv1.Diagnostic
	// TaskTypes are what the agent can do.
	TaskTypes []commonv1.TaskType
	Recovery  *commonv1.RecoveryCounters
}

// keptFacts are the facts of the agent that each event of its session has.
type keptFacts struct {
	version, ledgerID, bootID string
	protocol                  int32
	recovery                  *commonv1.RecoveryCounters
}

// State returns the state of the session.
func (s *Session) State() commonv1.SessionState { return commonv1.SessionState(s.state.Load()) }

// Seen notes a frame of the agent.
func (s *Session) Seen(now time.Time) { s.lastSeen.Store(int64(now.Sub(s.OpenedAt))) }

// LastSeen returns when the agent last sent a frame, by the monotonic clock: a step of the host's clock must not make
// the sessions of a replica late.
func (s *Session) LastSeen() time.Time { return s.OpenedAt.Add(time.Duration(s.lastSeen.Load())) }

// ReportsRefused counts n more reports of tasks that were not taken, and returns how many there were in this session.
func (s *Session) ReportsRefused(n int) int { return int(s.refused.Add(int64(n))) }

// Welcomed records recovery's answer to the session's Hello: its generation, and the node's fence epoch.
func (s *Session) Welcomed(instanceID string, generation, fence int64, nonce, replaces string, facts AgentFacts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instanceID, s.generation, s.fence, s.nonce, s.replaces = instanceID, generation, fence, nonce, replaces
	s.agent = keptFacts{
		version: facts.Version, ledgerID: facts.LedgerID, bootID: facts.BootID, protocol: facts.Protocol,
		recovery: facts.Recovery,
	}
	s.hello = &facts
	s.profile.reported = facts.Profile.GetFingerprint()
}

// SetInterval records the heartbeat interval that is sent to the agent, and the policy's bound of silence as it is now.
// If either is shorter than before, silence counts from now on, since the agent keeps its longer interval until it
// reads the new one.
func (s *Session) SetInterval(d time.Duration) {
	bound, now := s.roster.cfg.StaleAfter(), wallclock.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if bound < s.bound || d < s.interval {
		s.boundAt = now
	}
	s.interval, s.bound = d, bound
}

// silentLocked returns how long the agent has sent nothing since its last frame, or since boundAt if that is later.
func (s *Session) silentLocked(now time.Time) time.Duration {
	from := s.LastSeen()
	if s.boundAt.After(from) {
		from = s.boundAt
	}
	return now.Sub(from)
}

// guarded returns a field that mu guards.
func guarded[T any](mu *sync.Mutex, field *T) T {
	mu.Lock()
	defer mu.Unlock()
	return *field
}

// Generation returns the generation of the session; zero before Welcome.
func (s *Session) Generation() int64 { return guarded(&s.mu, &s.generation) }

// numbers returns the generation of the session, zero before Welcome, and the node's fence epoch at its opening.
func (s *Session) numbers() (int64, int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation, s.fence
}

// Nonce returns the nonce of the session's Welcome.
func (s *Session) Nonce() string { return guarded(&s.mu, &s.nonce) }

// Correlate records the correlation id of what brought the session: the recovery action that goes on.
func (s *Session) Correlate(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.correlation = id
}

// Correlation returns the correlation id of what brought the session; empty: nothing is known to have.
func (s *Session) Correlation() string { return guarded(&s.mu, &s.correlation) }

// InstanceID returns the id of the node's instance.
func (s *Session) InstanceID() string { return guarded(&s.mu, &s.instanceID) }

// LedgerID returns the id of the agent's ledger.
func (s *Session) LedgerID() string { return guarded(&s.mu, &s.agent.ledgerID) }

// Protocol is the version of the protocol that the agent speaks.
func (s *Session) Protocol() int32 { return guarded(&s.mu, &s.agent.protocol) }

// SetWorkReady records that lifecycle has raised the gate to this session: leases may be requested for it from now on.
func (s *Session) SetWorkReady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.workReady = true
}

// helloReported drops the facts of Hello but for what later events have: the newest diagnostics, and keptFacts. A fleet
// that comes back after an outage waits in this state for its gates.
func (s *Session) helloReported() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hello != nil && len(s.diags) == 0 {
		s.diags = newest(s.hello.Diags, keptDiagnostics)
	}
	s.hello = nil
}

// MayLease reports whether leases may be requested for the session.
func (s *Session) MayLease() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.workReady && !s.gone && s.cutAt.IsZero() && s.State() == commonv1.SessionState_SESSION_STATE_ADMITTED &&
		wallclock.Now().Add(s.roster.cfg.Offset()).Before(s.Identity.NotAfter)
}

// Gone reports whether the stream has ended.
func (s *Session) Gone() bool { return guarded(&s.mu, &s.gone) }

// Send queues a frame. It returns false if the session takes no more frames.
func (s *Session) Send(f *nodev1.ConnectResponse) bool {
	if !s.enqueue(f) {
		return false
	}
	s.roster.wg.Go(s.write)
	return true
}

// SendInline sends a frame from the handler's own goroutine. If a writer is running already it queues the frame
// instead.
func (s *Session) SendInline(f *nodev1.ConnectResponse) bool {
	if s.enqueue(f) {
		s.write()
	}
	return !s.Gone()
}

// enqueue queues a frame, and returns true if the caller must write the queue.
func (s *Session) enqueue(f *nodev1.ConnectResponse) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return false
	}
	size := proto.Size(f)
	if len(s.out) >= outboxLimit || (len(s.out) > 0 && s.outBytes+size > outboxBytes) {
		s.closeLocked(commonv1.Reason_REASON_SLOW_CONSUMER, "the agent does not read what it is sent", time.Time{})
		return false
	}
	s.out = append(s.out, f)
	s.outBytes += size
	if s.writing {
		return false
	}
	s.writing = true
	return true
}

func (s *Session) write() {
	for {
		s.mu.Lock()
		batch := s.out
		s.out, s.outBytes = nil, 0
		s.writingSince = time.Time{}
		if len(batch) == 0 || s.gone && !s.ending {
			s.writing = false
			if s.cond != nil {
				s.cond.Broadcast()
			}
			s.mu.Unlock()
			return
		}
		ending := s.ending
		s.mu.Unlock()
		for _, f := range batch {
			if ending && f.GetTaskOffer() != nil {
				continue // the session has ended: the task is offered to the next one
			}
			s.begin()
			if err := s.stream.Send(f); err != nil {
				_ = s.Identity.Conn.Close()
				s.mu.Lock()
				s.gone, s.ending = true, false
				s.mu.Unlock()
				break
			}
		}
	}
}

// begin notes that the next frame is being written.
func (s *Session) begin() {
	s.mu.Lock()
	s.writingSince = wallclock.Now()
	s.mu.Unlock()
}

// lastFrames is how long what is queued may still take after the handler has ended.
const lastFrames = time.Second

// finish ends sending. The handler calls it last: nothing may send after it returns.
func (s *Session) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.gone
	s.gone = true
	if !s.writing {
		return
	}
	// Another goroutine is writing, and the handler's last frame, its denial, may be queued behind what it writes: it is
	// sent, unless the session was gone before. A writer that is blocked on a peer which does not read ends with the
	// connection. One that has just sent its last frame needs a moment: if the connection were closed at once, the
	// stream's status would be lost.
	s.ending = !was
	cut := time.AfterFunc(lastFrames, func() {
		s.mu.Lock()
		s.ending = false
		s.mu.Unlock()
		_ = s.Identity.Conn.Close()
	})
	defer cut.Stop()
	for s.writing {
		s.wait()
	}
}

// Close sends a typed denial and gives the agent a moment to hang up before the connection is cut.
func (s *Session) Close(d *commonv1.Denial) {
	s.mu.Lock()
	already := !s.cutAt.IsZero() || s.gone
	s.closeLocked(d.GetReason(), d.GetMessage(), wallclock.Now().Add(closeGrace))
	s.mu.Unlock()
	if already {
		return
	}
	s.state.CompareAndSwap(int32(commonv1.SessionState_SESSION_STATE_ADMITTED),
		int32(commonv1.SessionState_SESSION_STATE_DRAINING))
	s.sendDenied(d)
	s.roster.nudge()
}

func (s *Session) sendDenied(d *commonv1.Denial) {
	s.mu.Lock()
	if s.gone {
		s.mu.Unlock()
		return
	}
	s.out = append(s.out, &nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_Denied{Denied: d}})
	start := !s.writing
	s.writing = true
	s.mu.Unlock()
	if start {
		s.roster.wg.Go(s.write)
	}
}

// closeGrace is how long an agent has to hang up after a denial. A fenced session must end within two seconds in all.
const closeGrace = 500 * time.Millisecond

func (s *Session) closeLocked(why commonv1.Reason, text string, cutAt time.Time) {
	if !s.cutAt.IsZero() {
		return
	}
	if cutAt.IsZero() {
		cutAt = wallclock.Now()
	}
	s.cutAt, s.closeWhy, s.closeText, s.workReady = cutAt, why, text, false
}

// Depart records that the agent announced its departure.
func (s *Session) Depart(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closeText == "" {
		s.closeText = "goodbye: " + why
	}
	s.workReady = false
}
