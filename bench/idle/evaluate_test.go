package idle

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

// TestALogWithoutItsRecordsIsNotChecked: whole pages do not count, and if a server does not report how many there are,
// a log that is too large with them is not judged. The result has that, and the reason.
func TestALogWithoutItsRecordsIsNotChecked(t *testing.T) {
	of := func(pages int64) records {
		return records{kinds: []kind{{Name: "Heap/UPDATE", Bytes: 1, Pages: pages}}}
	}
	without := records{unknown: "the server has no pg_walinspect"}
	for _, tt := range []struct {
		name       string
		wal        int64
		log        records
		passed     bool
		notChecked string
	}{
		{name: "small", wal: MostWAL, log: of(0), passed: true},
		{name: "large", wal: MostWAL + 1, log: of(0)},
		{name: "large by its pages", wal: 3 * MostWAL, log: of(2 * MostWAL), passed: true},
		{name: "small, without its records", wal: MostWAL, log: without, passed: true},
		{
			name: "large, without its records", wal: 3 * MostWAL, log: without, passed: true,
			notChecked: "the server has no pg_walinspect",
		},
	} {
		before := seen{at: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
		after := seen{at: before.at.Add(time.Minute), vacuums: vacuums{Vacuums: 3, Analyzes: 2}}
		after.WAL = tt.wal
		result := evaluate(Options{}, before, after, tt.log)
		if result.Passed != tt.passed {
			t.Errorf("%s: passed is %v", tt.name, result.Passed)
		}
		if _, reported := result.Details["wal_full_page_bytes_per_minute"]; reported != (tt.log.unknown == "") {
			t.Errorf("%s: the bytes of whole pages are told: %v", tt.name, reported)
		}
		if result.Details["autovacuums"] != int64(3) || result.Details["autoanalyzes"] != int64(2) {
			t.Errorf("%s: %v vacuums and %v analyzes are told", tt.name, result.Details["autovacuums"],
				result.Details["autoanalyzes"])
		}
		var text bytes.Buffer
		if err := result.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		if not := strings.Join(result.NotChecked, "; "); !strings.HasSuffix(not, tt.notChecked) ||
			(not != "") != (tt.notChecked != "") ||
			strings.Contains(text.String(), "not judged") != (not != "") {
			t.Errorf("%s: not judged is %q in\n%s", tt.name, not, text.String())
		}
	}
}

// TestAVacuumHasItsShareOfTheLog: the records that a vacuum alone writes are added up without their whole pages.
func TestAVacuumHasItsShareOfTheLog(t *testing.T) {
	log := records{kinds: []kind{
		{Name: "Heap/UPDATE", Bytes: 1000},
		{Name: "Heap2/PRUNE_VACUUM_SCAN", Bytes: 20, Pages: 8192},
		{Name: "Btree/VACUUM", Bytes: 3},
	}}
	if n := log.vacuumed(); n != 23 {
		t.Errorf("a vacuum wrote %d bytes, want 23", n)
	}
}
