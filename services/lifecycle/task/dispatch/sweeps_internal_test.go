package dispatch

import (
	"testing"
	"time"
)

// TestACancelSoonAfterASweepWaitsForTheNextAndNotForAQuietPeriod: a hub without work sweeps whole at an event. The
// cancel of a running task, which is no work to be listed, comes just after.
func TestACancelSoonAfterASweepWaitsForTheNextAndNotForAQuietPeriod(t *testing.T) {
	t.Parallel()
	now := time.Now()
	quiet := 10 * sweepEvery
	s := sweeps{busy: now.Add(-2 * busyFor), last: now.Add(-2 * sweepEvery)}
	if !s.event(now) {
		t.Fatal("an event after a quiet time caused no whole sweep")
	}
	if got := s.wait(now, quiet); got != quiet {
		t.Errorf("without an event the hub waits for %s", got)
	}
	now = now.Add(sweepEvery / 4)
	if s.event(now) {
		t.Fatal("two whole sweeps in less than sweepEvery")
	}
	if got := s.wait(now, quiet); got != sweepEvery-sweepEvery/4 {
		t.Errorf("the cancel waits for %s", got)
	}
	s.timed(now.Add(sweepEvery))
	if got := s.wait(now.Add(sweepEvery), quiet); got != quiet {
		t.Errorf("after its sweep the hub waits for %s", got)
	}
}
