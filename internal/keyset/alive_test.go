package keyset

import "testing"

// TestAReplicaLivesThoughAReportIsLate holds that a replica counts until a second report of it should have come, by the poll that makes a report late.
func TestAReplicaLivesThoughAReportIsLate(t *testing.T) {
	if least := 2 * (reportEvery + PollEvery); liveFor < least {
		t.Errorf("a report counts for %s, and two take up to %s", liveFor, least)
	}
}
