package attempts

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// File is the name of the record in the state directory.
const File = "recovery.json"

const (
	window = time.Hour
	// defaultPerHour holds until a control plane has sent its policy.
	defaultPerHour = 6
	// mostPerHour bounds the attempts that are kept, whatever policy was sent.
	mostPerHour = 3600
	maxOutcome  = 64
)

// record is the content of the file.
type record struct {
	Attempts      int64     `json:"attempts"`
	Successes     int64     `json:"successes"`
	Failures      int64     `json:"failures"`
	Suppressed    int64     `json:"suppressed"`
	LastAttemptAt time.Time `json:"last_attempt_at,omitzero"`
	LastOutcome   string    `json:"last_outcome,omitempty"`
	// Recent are when the attempts of the last hour were made, by the wall clock as it was when they were written.
	Recent []time.Time `json:"recent,omitempty"`
	// Fresh is the certificate that the last success brought, until a session is admitted.
	Fresh   *fresh `json:"fresh,omitempty"`
	Auto    *bool  `json:"auto_recovery,omitempty"` // of the last policy; nil: none was received
	PerHour int32  `json:"recovery_attempts_per_hour,omitempty"`
	// UntrustedSince is since when the node API is untrusted, by the wall clock; zero: it is not.
	UntrustedSince time.Time `json:"untrusted_since,omitzero"`
	TrustDwell     int64     `json:"trust_dwell_seconds,omitempty"` // of the last policy
	// MissingReportedAt is when enrolment was told last that no recovery token is held; zero: not since the last session.
	MissingReportedAt time.Time `json:"missing_told_at,omitzero"`
	// MissingTried are the attempts of the last hour to tell it so, as Recent are those to recover.
	MissingTried []time.Time `json:"missing_tried,omitempty"`
}

type fresh struct {
	Serial   string    `json:"serial"`
	Ends     time.Time `json:"ends"`
	Rejected string    `json:"rejected,omitempty"` // why it was refused; empty: it was not
}

// Config sets where the record is, and the clocks.
type Config struct {
	Dir     string
	Wall    func() time.Time     // the host's wall clock
	Elapsed func() time.Duration // the monotonic clock
	Now     func() time.Time     // the best estimate of the true time, by which certificates end
	Room    *room.Reserve        // nil: there is no reserve
}

// Governor decides about attempts. It is safe for concurrent use.
type Governor struct {
	cfg   Config
	aside error

	mu  sync.Mutex
	rec record
	// marks are when the attempts of the last hour were made, by the monotonic clock; those of earlier runs may be below
	// zero.
	marks []time.Duration
	// untrusted is rec.UntrustedSince by the monotonic clock.
	untrusted time.Duration
	// missingReported is rec.MissingReportedAt by the monotonic clock.
	missingReported time.Duration
	// missingTries are rec.MissingTried by the monotonic clock.
	missingTries []time.Duration
	// unwritten is set after a change that could not be written.
	unwritten bool
}

// Open reads the record. One that cannot be read is renamed to `recovery.json.bad`, and a new one begins.
func Open(cfg Config) (*Governor, error) {
	g := &Governor{cfg: cfg}
	entries, err := os.ReadDir(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("read state directory: %w", err)
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), unfinished) {
			if err := os.Remove(filepath.Join(cfg.Dir, entry.Name())); err != nil {
				return nil, fmt.Errorf("remove unfinished record of recovery: %w", err)
			}
		}
	}
	if _, g.aside = jsonfile.Read(cfg.Dir, File, &g.rec); g.aside != nil {
		path := filepath.Join(cfg.Dir, File)
		if err := os.Rename(path, path+".bad"); err != nil {
			return nil, fmt.Errorf("set unreadable record of recovery aside: %w", err)
		}
		g.rec = record{}
	}
	now, wall := cfg.Elapsed(), cfg.Wall()
	for _, at := range g.rec.Recent[max(len(g.rec.Recent)-mostPerHour, 0):] {
		// An attempt in the future was made before the clock was set back: it counts as made now.
		g.marks = append(g.marks, now-max(wall.Sub(at), 0))
	}
	if since := g.rec.UntrustedSince; !since.IsZero() { // one in the future, as after the clock was set back, is now
		g.untrusted = now - max(wall.Sub(since), 0)
	}
	g.openMissing(now, wall)
	return g, nil
}

const unfinished = "." + File + "-"

// SetAside returns why the record that Open found was set aside; nil: it was not.
func (g *Governor) SetAside() error { return g.aside }

// changeLocked applies a change and makes it durable. After an error the change holds in memory.
func (g *Governor) changeLocked(change func(*record)) error {
	change(&g.rec)
	now, wall := g.cfg.Elapsed(), g.cfg.Wall()
	g.rec.Recent, g.rec.MissingTried = g.rec.Recent[:0], g.rec.MissingTried[:0]
	for _, mark := range g.recentLocked() {
		g.rec.Recent = append(g.rec.Recent, wall.Add(mark-now))
	}
	for _, mark := range g.triesLocked() {
		g.rec.MissingTried = append(g.rec.MissingTried, wall.Add(mark-now))
	}
	err := g.cfg.Room.Do(func() error { return jsonfile.Write(g.cfg.Dir, File, g.rec) })
	g.unwritten = err != nil
	return err
}

// SetPolicy keeps what the control plane allows. It writes only a change, or what could not be written before. Where
// perHour is zero, as an earlier control plane sends it, the last limit stays.
func (g *Governor) SetPolicy(auto bool, perHour int32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if perHour <= 0 {
		perHour = g.rec.PerHour
	}
	if !g.unwritten && g.rec.Auto != nil && *g.rec.Auto == auto && g.rec.PerHour == perHour {
		return nil
	}
	return g.changeLocked(func(r *record) { r.Auto, r.PerHour = &auto, perHour })
}

// Allowed reports whether the host may try to recover by itself, as far as the policy decides. Where none was received,
// otherwise holds. Where the last one that was received does not allow it, the host may try if it has not done so
// within an hour: a host that is refused is sent no other policy, and the control plane decides by the present one.
func (g *Governor) Allowed(otherwise bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rec.Auto == nil {
		return otherwise
	}
	return *g.rec.Auto || len(g.recentLocked()) == 0
}

// recentLocked returns when the attempts of the last hour were made.
func (g *Governor) recentLocked() []time.Duration {
	now := g.cfg.Elapsed()
	g.marks = slices.DeleteFunc(g.marks, func(mark time.Duration) bool { return now-mark >= window })
	return g.marks
}

// SuppressedError means that an attempt is not allowed now.
type SuppressedError struct {
	Why  string
	Wait time.Duration // until one may be; zero: that is not known
}

// Error returns the cause.
func (e *SuppressedError) Error() string { return "automatic recovery is suppressed: " + e.Why }

// Begin counts an attempt and allows it, or counts one that is suppressed and returns a *SuppressedError. Any other
// error means that the attempt could not be written down, so that it must not be made.
func (g *Governor) Begin() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if refusal := g.refusalLocked(); refusal != nil {
		return errors.Join(refusal, g.changeLocked(func(r *record) { r.Suppressed++ }))
	}
	g.marks = append(g.marks, g.cfg.Elapsed())
	return g.changeLocked(func(r *record) {
		r.Attempts++
		r.LastAttemptAt, r.LastOutcome = g.cfg.Wall(), "in flight"
	})
}

func (g *Governor) refusalLocked() error {
	if f := g.rec.Fresh; f != nil && f.Rejected != "" {
		if left := f.Ends.Sub(g.cfg.Now()); left > 0 {
			return &SuppressedError{
				Why: "the certificate " + f.Serial + " that the last recovery brought was refused: " + f.Rejected, Wait: left,
			}
		}
	}
	limit := g.limitLocked()
	now, marks := g.cfg.Elapsed(), g.recentLocked()
	if len(marks) < limit {
		return nil
	}
	oldest := marks[len(marks)-limit]
	return &SuppressedError{
		Why:  fmt.Sprintf("%d attempts in this hour are the most that the policy allows", limit),
		Wait: window - (now - oldest),
	}
}

// limitLocked returns how many attempts the policy allows in an hour.
func (g *Governor) limitLocked() int {
	if g.rec.PerHour <= 0 {
		return defaultPerHour
	}
	return int(g.rec.PerHour)
}

// End records what an attempt that failed came to, and whether it counts against the hour.
func (g *Governor) End(outcome string, counts bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !counts && len(g.marks) > 0 {
		g.marks = g.marks[:len(g.marks)-1]
	}
	return g.changeLocked(func(r *record) {
		r.Failures++
		r.LastOutcome = outcome[:min(len(outcome), maxOutcome)]
	})
}

// Recovered records that an attempt brought a certificate, which ends at a time.
func (g *Governor) Recovered(outcome, serial string, ends time.Time) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changeLocked(func(r *record) {
		r.Successes++
		r.LastOutcome, r.Fresh = outcome, &fresh{Serial: serial, Ends: ends}
	})
}

// Refused records that the control plane refused the certificate of a serial. A refusal of the certificate that the
// last success brought suppresses further attempts, unless the certificate has ended.
func (g *Governor) Refused(serial, why string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	f := g.rec.Fresh
	if f == nil || f.Serial != serial || f.Rejected != "" || !g.cfg.Now().Before(f.Ends) {
		return nil
	}
	return g.changeLocked(func(r *record) { r.Fresh = &fresh{Serial: f.Serial, Ends: f.Ends, Rejected: why} })
}

// ClearFailures is called when a session is admitted, or when an operator has enrolled the host anew: the failures are
// over.
func (g *Governor) ClearFailures() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.rec.Fresh == nil && g.rec.MissingReportedAt.IsZero() && len(g.missingTries) == 0 {
		return nil
	}
	g.missingTries = nil
	return g.changeLocked(func(r *record) { r.Fresh, r.MissingReportedAt = nil, time.Time{} })
}

// Counters returns the counts as Hello reports them.
func (g *Governor) Counters() *commonv1.RecoveryCounters {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := &commonv1.RecoveryCounters{
		Attempts: g.rec.Attempts, Successes: g.rec.Successes, Failures: g.rec.Failures, Suppressed: g.rec.Suppressed,
		LastOutcome: g.rec.LastOutcome,
	}
	if !g.rec.LastAttemptAt.IsZero() {
		out.LastAttemptAt = timestamppb.New(g.rec.LastAttemptAt)
	}
	return out
}
