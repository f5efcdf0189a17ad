package process

import "testing"

// TestARestartCountsOnceItHasHappened: a workload that waits for its backoff has not been restarted.
func TestARestartCountsOnceItHasHappened(t *testing.T) {
	for _, tc := range []struct {
		phase string
		count int32
		want  int32
	}{
		{phaseRunning, 0, 0},
		{phaseBackoff, 1, 0},
		{phaseStarting, 1, 1},
		{phaseRunning, 1, 1},
		{phaseExited, 1, 1},
		{phaseBackoff, 2, 1},
		{phaseBackoff, 0, 0}, // its start failed, which is no restart
	} {
		if got := (state{Phase: tc.phase, Restarts: tc.count}).restarted(); got != tc.want {
			t.Errorf("%s after %d: restarted %d times, want %d", tc.phase, tc.count, got, tc.want)
		}
	}
}
