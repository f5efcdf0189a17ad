package attempts_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
)

// host is a host with a wall clock and a monotonic clock that a test sets.
type host struct {
	t       *testing.T
	dir     string
	wall    time.Time
	elapsed time.Duration
	g       *attempts.Governor
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{t: t, dir: t.TempDir(), wall: time.Date(2026, 11, 27, 4, 0, 0, 0, time.UTC)}
	h.boot()
	return h
}

// boot starts the agent again: the monotonic clock begins anew.
func (h *host) boot() {
	h.t.Helper()
	var err error
	h.elapsed = 0
	if h.g, err = attempts.Open(attempts.Config{
		Dir: h.dir, Wall: func() time.Time { return h.wall }, Now: func() time.Time { return h.wall },
		Elapsed: func() time.Duration { return h.elapsed },
	}); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) pass(d time.Duration) { h.wall, h.elapsed = h.wall.Add(d), h.elapsed+d }

// attempt makes one attempt that is refused, if it is allowed, and reports whether it was.
func (h *host) attempt() bool {
	h.t.Helper()
	err := h.g.Begin()
	if suppressed, ok := errors.AsType[*attempts.SuppressedError](err); ok {
		if suppressed.Wait <= 0 || suppressed.Wait > 24*time.Hour {
			h.t.Errorf("suppressed for %v", suppressed.Wait)
		}
		return false
	}
	h.must(err)
	h.must(h.g.End("token_expired", true))
	return true
}

func (h *host) must(err error) {
	h.t.Helper()
	if err != nil {
		h.t.Fatal(err)
	}
}

// attempts makes as many attempts as are allowed now.
func (h *host) attempts() int {
	n := 0
	for h.attempt() {
		n++
	}
	return n
}

// TestADayOfRefusals makes an attempt every 40 s for a day, and restarts the agent now and then.
func TestADayOfRefusals(t *testing.T) {
	for name, restart := range map[string]time.Duration{
		"without restarts": 48 * time.Hour, "with restarts": 7 * time.Minute,
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.must(h.g.SetPolicy(true, 5))
			made, last := 0, time.Duration(0)
			for at := time.Duration(0); at < 24*time.Hour; at += 40 * time.Second {
				if at-last > restart {
					last = at
					h.boot()
				}
				if h.attempt() {
					made++
				}
				h.pass(40 * time.Second)
			}
			if made > 5*24 || made < 5*24-5 {
				t.Errorf("%d attempts in a day of 5 an hour", made)
			}
			c := h.g.Counters()
			if c.GetAttempts() != int64(made) || c.GetFailures() != int64(made) || c.GetSuccesses() != 0 ||
				c.GetSuppressed() != 24*90-int64(made) || c.GetLastOutcome() != "token_expired" ||
				c.GetLastAttemptAt().AsTime().Before(h.wall.Add(-2*time.Hour)) {
				t.Errorf("counters %v after %d attempts", c, made)
			}
		})
	}
}

// TestAClockThatJumpsAllowsNoMore: within a run a jump of the wall clock changes nothing; between two runs attempts of
// the future count for an hour, and those of a day ago do not.
func TestAClockThatJumpsAllowsNoMore(t *testing.T) {
	const day = 24 * time.Hour
	for name, jump := range map[string]time.Duration{"forward": day, "back": -day} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			if n := h.attempts(); n != 6 {
				t.Fatalf("%d attempts before a policy was received", n)
			}
			h.wall = h.wall.Add(jump)
			if n := h.attempts(); n != 0 {
				t.Errorf("the jump allowed %d", n)
			}
			h.boot()
			if n := h.attempts(); n != 0 {
				t.Errorf("a restart after the jump allowed %d", n)
			}
			h.pass(time.Hour)
			if n := h.attempts(); n != 6 {
				t.Errorf("%d an hour later", n)
			}
			h.wall = h.wall.Add(jump) // while the host is off
			h.boot()
			want := map[bool]int{true: 6, false: 0}[jump > 0]
			if n := h.attempts(); n != want {
				t.Errorf("%d after a boot with another clock, want %d", n, want)
			}
			h.pass(time.Hour)
			if n := h.attempts(); n != 6 {
				t.Errorf("%d an hour after the boot", n)
			}
		})
	}
}

// TestARejectedFreshCertificateSuppresses checks that the rejection of a fresh certificate keeps further attempts back
// until a session is admitted or the certificate ends.
func TestARejectedFreshCertificateSuppresses(t *testing.T) {
	h := newHost(t)
	h.must(h.g.Refused("1", "certificate_expired"))
	h.must(h.g.Begin())
	h.must(h.g.Recovered("succeeded", "2", h.wall.Add(8*time.Hour)))
	h.must(h.g.Refused("2", "serial_unknown"))
	h.boot()
	if h.attempt() {
		t.Error("allowed after the fresh certificate was refused")
	}
	h.pass(7 * time.Hour)
	if h.attempt() {
		t.Error("allowed while the refused certificate lives")
	}
	h.pass(2 * time.Hour)
	if !h.attempt() {
		t.Error("not allowed after the refused certificate has ended")
	}

	h.must(h.g.Begin())
	h.must(h.g.Recovered("succeeded", "3", h.wall.Add(8*time.Hour)))
	h.must(h.g.Refused("3", "serial_unknown"))
	if h.attempt() {
		t.Error("allowed after another fresh certificate was refused")
	}
	h.must(h.g.ClearFailures())
	if !h.attempt() {
		t.Error("not allowed after a session was admitted")
	}
	c := h.g.Counters()
	if c.GetAttempts() != 4 || c.GetSuccesses() != 2 || c.GetFailures() != 2 || c.GetSuppressed() != 3 {
		t.Errorf("counters %v", c)
	}

	// The end of a fresh certificate is no rejection.
	h.must(h.g.Recovered("succeeded", "4", h.wall.Add(time.Hour)))
	h.pass(2 * time.Hour)
	h.must(h.g.Refused("4", "certificate_expired"))
	if !h.attempt() {
		t.Error("not allowed after the fresh certificate has ended")
	}
}

// TestWhatReachedNoServerDoesNotCount checks that an outage of the enrolment listener uses up none of the attempts of
// the hour.
func TestWhatReachedNoServerDoesNotCount(t *testing.T) {
	h := newHost(t)
	for range 100 {
		h.must(h.g.Begin())
		h.must(h.g.End("connection_refused", false))
	}
	if n := h.attempts(); n != 6 {
		t.Errorf("%d attempts", n)
	}
}

// TestAPolicyThatIsOffIsAskedForOnceAnHour: an attempt alone shows whether it is still off. Restarts allow no more.
func TestAPolicyThatIsOffIsAskedForOnceAnHour(t *testing.T) {
	h := newHost(t)
	h.must(h.g.SetPolicy(false, 6))
	made := 0
	for range 24 * 60 {
		if h.g.Allowed(true) && h.attempt() {
			made++
		}
		h.boot()
		h.pass(time.Minute)
	}
	if made != 24 {
		t.Errorf("%d attempts in a day", made)
	}
	h.must(h.g.SetPolicy(true, 6))
	h.boot()
	if !h.g.Allowed(false) {
		t.Error("the policy is forgotten")
	}
}

// TestALimitOutlivesAPolicyWithoutOne: an earlier control plane sends none.
func TestALimitOutlivesAPolicyWithoutOne(t *testing.T) {
	h := newHost(t)
	h.must(h.g.SetPolicy(true, 2))
	h.must(h.g.SetPolicy(false, 0))
	h.must(h.g.SetPolicy(true, 0))
	h.boot()
	if n := h.attempts(); n != 2 {
		t.Errorf("%d attempts", n)
	}
}

// TestAPolicyThatWasNotWrittenIsWrittenAgain checks that a policy that could not be written is written when it comes
// again, also if it is the same.
func TestAPolicyThatWasNotWrittenIsWrittenAgain(t *testing.T) {
	h := newHost(t)
	h.must(os.RemoveAll(h.dir))
	if err := h.g.SetPolicy(false, 2); err == nil {
		t.Fatal("written without a directory")
	}
	h.must(os.Mkdir(h.dir, 0o700))
	h.must(h.g.SetPolicy(false, 2))
	h.boot()
	if n := h.attempts(); n != 2 || h.g.Allowed(true) {
		t.Errorf("the policy is forgotten: %d attempts", n)
	}
}

// TestABrokenRecordIsSetAside: the agent starts, and counts anew.
func TestABrokenRecordIsSetAside(t *testing.T) {
	h := newHost(t)
	h.attempts()
	for _, content := range []string{"", "{", `{"attempts": "x"}`, `{"recent": ["never"]}`} {
		if err := os.WriteFile(filepath.Join(h.dir, attempts.File), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		h.boot()
		if h.g.SetAside() == nil || h.g.Counters().GetAttempts() != 0 {
			t.Errorf("%q was read as a record: %v", content, h.g.Counters())
		}
	}
}

// TestMissingTokenIsReportedOnceAnHour checks that the agent may report once an hour that it has no token, across
// restarts, and again after a session was admitted.
func TestMissingTokenIsReportedOnceAnHour(t *testing.T) {
	h := newHost(t)
	reported := 0
	for at := time.Duration(0); at < 24*time.Hour; at += time.Minute {
		if h.mayReport() {
			h.must(h.g.EndMissing(true, false))
			reported++
		}
		if at%(7*time.Minute) == 0 {
			h.boot()
		}
		h.pass(time.Minute)
	}
	if reported != 24 {
		t.Errorf("told %d times in a day", reported)
	}
	h.must(h.g.ClearFailures())
	h.boot()
	if !h.mayReport() {
		t.Error("after a session it may not be told")
	}
	h.must(h.g.EndMissing(true, false))
	h.wall = h.wall.Add(-48 * time.Hour)
	h.boot()
	h.pass(time.Hour)
	if !h.mayReport() {
		t.Error("an hour after the clock was set back it may not be told")
	}
}

// TestALossIsReportedAgainUntilEnrolmentHasTakenNote checks that a loss is reported with each attempt as long as
// enrolment has not decided, otherwise as often in an hour as the policy allows, across restarts, and beside the
// attempts to recover.
func TestALossIsReportedAgainUntilEnrolmentHasTakenNote(t *testing.T) {
	h := newHost(t)
	h.must(h.g.SetPolicy(true, 3))
	tried := func(counts bool) int {
		count := 0
		for range 10 {
			if h.mayReport() {
				h.must(h.g.EndMissing(false, counts))
				count++
			}
			h.boot()
		}
		return count
	}
	if n := tried(false); n != 10 {
		t.Errorf("%d attempts that do not count", n)
	}
	if n := tried(true); n != 3 {
		t.Errorf("%d attempts that count", n)
	}
	if n := h.attempts(); n != 3 {
		t.Errorf("%d attempts to recover beside them", n)
	}
	h.pass(time.Hour)
	if n := tried(true); n != 3 {
		t.Errorf("%d attempts in the next hour", n)
	}
	h.must(h.g.ClearFailures())
	if !h.mayReport() {
		t.Error("after a session it may not be told")
	}
}

// mayReport reports whether enrolment may be told that no token is held.
func (h *host) mayReport() bool {
	h.t.Helper()
	may, err := h.g.BeginMissing()
	h.must(err)
	return may
}
