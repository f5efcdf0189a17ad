package service

import (
	"testing"
	"time"
)

// TestAListeningConnectionStandsForPings: without one, a database that is gone is detected within seconds.
func TestAListeningConnectionStandsForPings(t *testing.T) {
	t.Parallel()
	if p := pingPeriod(false); p > 3*time.Second {
		t.Errorf("a ping counts for %s while nothing listens", p)
	}
	if p := pingPeriod(true); p != 30*time.Second {
		t.Errorf("a ping counts for %s while a connection listens", p)
	}
}
