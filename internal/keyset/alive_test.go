package keyset

import "testing"

// TestAReplicaLivesThoughAReportIsLate checks that a replica counts as live until its second next report is due,
// including the poll by which a report may be late.
func TestAReplicaLivesThoughAReportIsLate(t *testing.T) {
	if least := 2 * (reportEvery + PollEvery); liveFor < least {
		t.Errorf("a report counts for %s, and two take up to %s", liveFor, least)
	}
}
