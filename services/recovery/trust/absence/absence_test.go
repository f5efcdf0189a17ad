package absence_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/services/recovery/trust/absence"
)

// TestAnAbsenceCountsFromTheLastProof checks from when an absence counts: from the first check without an answer, and
// from the last signature if the authority answered and did not sign, since it may have signed nothing since; and that
// one that lasts is recorded again every half minute.
func TestAnAbsenceCountsFromTheLastProof(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }
	for name, c := range map[string]struct {
		answered bool
		signed   bool // by this holder of the lease
		from     time.Time
	}{
		"no answer":                         {false, true, at(300)},
		"no signature":                      {true, true, at(0)},
		"no signature, and none was before": {true, false, at(300)},
	} {
		t.Run(name, func(t *testing.T) {
			var count absence.Count
			add := func(seconds int, failed bool, want absence.Stop) {
				t.Helper()
				answered := !failed || c.answered
				if got := count.Add(failed, answered, at(seconds)); got != want {
					t.Fatalf("after %d s: %+v, want %+v", seconds, got, want)
				}
				if want != (absence.Stop{}) {
					count.Recorded(want)
				}
			}
			if c.signed {
				count.Signed(at(0))
			}
			add(15, false, absence.Stop{Until: at(15)}) // of a holder before
			add(285, false, absence.Stop{})
			add(300, true, absence.Stop{})
			add(315, true, absence.Stop{})
			add(330, true, absence.Stop{From: c.from})
			add(345, true, absence.Stop{})
			add(360, true, absence.Stop{From: c.from, GoesOn: true})
			add(375, true, absence.Stop{})
			add(390, true, absence.Stop{From: c.from, GoesOn: true})
			count.Signed(at(405))
			add(405, false, absence.Stop{Until: at(405)})
			add(420, true, absence.Stop{})
			add(421, false, absence.Stop{})
		})
	}
}
