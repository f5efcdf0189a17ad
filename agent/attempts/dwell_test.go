package attempts_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/attempts"
)

// TestTheDwellOutlivesTheProcess: a restart does not begin it anew, what its policy said stays, and the clock of the
// host may jump while the process runs.
func TestTheDwellOutlivesTheProcess(t *testing.T) {
	now := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	elapsed := time.Duration(0)
	cfg := attempts.Config{
		Dir: t.TempDir(), Wall: func() time.Time { return now }, Elapsed: func() time.Duration { return elapsed },
		Now: func() time.Time { return now },
	}
	open := func() *attempts.Governor {
		t.Helper()
		g, err := attempts.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	pass := func(d time.Duration) { now, elapsed = now.Add(d), elapsed+d }
	over := func(g *attempts.Governor, want bool, when string) {
		t.Helper()
		if got, err := g.Untrusted(); err != nil || got != want {
			t.Errorf("%s: over %t, %v", when, got, err)
		}
	}
	g := open()
	if d := g.TrustDwell(); d != 10*time.Minute {
		t.Errorf("a dwell of %s without a policy", d)
	}
	if err := g.SetTrustDwell(time.Minute); err != nil {
		t.Fatal(err)
	}
	over(g, false, "at first")
	pass(40 * time.Second)
	now = now.Add(time.Hour) // the host's clock is set
	over(g, false, "after 40 s, with the clock set forward")
	now = now.Add(-time.Hour)
	for range 3 {
		elapsed = 0 // another process, and its monotonic clock
		g = open()
	}
	if d := g.TrustDwell(); d != time.Minute {
		t.Errorf("a dwell of %s after a restart", d)
	}
	over(g, false, "after a restart")
	pass(20 * time.Second)
	over(g, true, "after a minute, over a restart")
	if err := g.DwellAnew(); err != nil {
		t.Fatal(err)
	}
	over(g, false, "after an attempt")
	pass(time.Minute)
	over(g, true, "a minute after the attempt")
	if err := g.Trusted(); err != nil {
		t.Fatal(err)
	}
	over(open(), false, "after it was trusted")
	now = now.Add(-24 * time.Hour) // the clock goes back between two runs: it began now
	g = open()
	over(g, false, "with a begin in the future")
	pass(time.Minute)
	over(g, true, "a minute later")
	if err := g.SetTrustDwell(1 << 62); err != nil || g.TrustDwell() != 24*time.Hour {
		t.Errorf("a dwell of %s, %v", g.TrustDwell(), err)
	}
	if err := g.SetTrustDwell(0); err != nil || g.TrustDwell() != 24*time.Hour {
		t.Errorf("an earlier control plane sets a dwell of %s, %v", g.TrustDwell(), err)
	}
}
