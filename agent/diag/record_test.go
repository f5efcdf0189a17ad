package diag_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/diag"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
)

const full = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_STATE_DISK_FULL

// The attempts of one outage share a correlation id, which a restart keeps and an admission ends.
func TestAnOutageHasOneCorrelation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	l := open(t, path, nil)
	if err := l.Alive("agent 1 runs"); err != nil || l.Correlation() != "" {
		t.Fatalf("a sign of life begins an outage: %q, %v", l.Correlation(), err)
	}
	first, err := l.Record(refused, "a", time.Second)
	if err != nil || !ids.Valid(first.RetryCorrelationID) || first.RetryCorrelationID != l.Correlation() {
		t.Fatalf("%+v, %v", first, err)
	}
	if attrs := first.Attrs(); len(attrs) != 5 || attrs[0].Value.String() != first.RetryCorrelationID ||
		attrs[1].Value.String() != first.DedupeKeyHash || len(first.DedupeKeyHash) != 32 {
		t.Errorf("the log of the retry has %v", attrs)
	}
	if disk, err := l.Record(full, "no room", 0); err != nil || disk.RetryCorrelationID != "" {
		t.Errorf("of the host itself: %+v, %v", disk, err)
	}
	l = open(t, path, nil) // the agent starts again
	second, err := l.Record(polled, "b", time.Second)
	if err != nil || second.RetryCorrelationID != first.RetryCorrelationID {
		t.Fatalf("after a restart: %+v, %v", second, err)
	}
	if err := l.Admitted(nil); err != nil || l.Correlation() != "" {
		t.Fatalf("%q, %v", l.Correlation(), err)
	}
	for _, e := range l.Entries() {
		if over := e.RetryCorrelationID == first.RetryCorrelationID; over == e.EndedAt.IsZero() {
			t.Errorf("after the admission: %+v", e)
		}
	}
	if e, err := l.Record(polled, "b", time.Second); err != nil || e.RetryCorrelationID != "" || e.Count != 1 {
		t.Errorf("while a session stands: %+v, %v", e, err)
	}
	l = open(t, path, nil)
	l.Lost()
	if e, err := l.Record(polled, "b", time.Second); err != nil || e.RetryCorrelationID == "" ||
		e.RetryCorrelationID == first.RetryCorrelationID {
		t.Errorf("the next outage: %+v, %v", e, err)
	}
}

// Failures that alternate in one outage are one record each.
func TestAlternatingFailuresOfAnOutage(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "diag.json"), nil)
	for range 2 {
		record(t, l, refused, "a")
		record(t, l, polled, "b")
	}
	got := l.Entries()
	if len(got) != 2 || got[0].Detail != "a" || got[0].Count != 2 || got[1].Detail != "b" || got[1].Count != 2 {
		t.Errorf("%+v", got)
	}
}

// A failure that was reported is not reported again after a reconnect or a restart, unless it is over or has happened
// often since.
func TestAnEntryIsReportedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	l := open(t, path, nil)
	codes := func(list []diag.Entry) string {
		var out []string
		for _, e := range list {
			out = append(out, e.Code)
		}
		return strings.Join(out, " ")
	}
	if err := l.Alive("agent 1 runs"); err != nil {
		t.Fatal(err)
	}
	record(t, l, refused, "a")
	record(t, l, full, "no room")
	hello := l.Unreported()
	if got := codes(hello); got != "connection_refused state_disk_full" {
		t.Fatalf("Hello has %q", got)
	}
	if err := l.Admitted(hello); err != nil {
		t.Fatal(err)
	}
	l = open(t, path, nil)
	if got := codes(l.Unreported()); got != "" {
		t.Errorf("told again: %q", got)
	}
	if err := l.Admitted(nil); err != nil {
		t.Fatal(err)
	}
	record(t, l, polled, "renewal")
	news := l.News()
	if got := codes(news); got != "task_poll_failed" {
		t.Fatalf("a report has %q", got)
	}
	if err := l.NoteReported(news); err != nil || codes(l.News()) != "" {
		t.Errorf("%q, %v", codes(l.News()), err)
	}
	record(t, l, polled, "renewal")
	record(t, l, polled, "renewal")
	if got := codes(l.News()); got != "task_poll_failed" {
		t.Errorf("three times, once of them told: %q", got)
	}
	if err := l.NoteReported(l.News()); err != nil {
		t.Fatal(err)
	}
	record(t, l, polled, "renewal")
	if got := codes(l.News()); got != "" {
		t.Errorf("once more is no news: %q", got)
	}
	if ended, err := l.End(full); err != nil || !ended {
		t.Fatalf("%t, %v", ended, err)
	}
	if got := codes(l.News()); got != "state_disk_full" {
		t.Errorf("that it is over is news: %q", got)
	}
}

// All signs of life are one record, and failures with a sign of life between them are one record as well.
func TestTheSignOfLifeIsOneRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	l := open(t, path, nil)
	for range 3 {
		if err := l.Alive("agent 1 runs"); err != nil {
			t.Fatal(err)
		}
		record(t, l, refused, "read tcp 127.0.0.1:40001->127.0.0.1:443: reset")
		record(t, l, refused, "read tcp 127.0.0.1:40002->127.0.0.1:443: reset")
	}
	l = open(t, path, nil)
	if err := l.Alive("agent 1 runs"); err != nil {
		t.Fatal(err)
	}
	counts := map[string]int64{}
	for _, e := range l.Entries() {
		counts[e.Code] += e.Count
		if e.Code == "process_alive" && e.Count != 4 {
			t.Errorf("%+v", e)
		}
	}
	if len(l.Entries()) > 3 || counts["process_alive"] != 4 || counts["connection_refused"] != 6 {
		t.Errorf("%+v", l.Entries())
	}
	if err := l.Admitted(nil); err != nil {
		t.Fatal(err)
	}
	before := len(l.Entries())
	if err := l.Alive("agent 1 runs"); err != nil || len(l.Entries()) != before {
		t.Errorf("while a session is admitted: %+v, %v", l.Entries(), err)
	}
}

// The file of an earlier build has no ids, and that of a later build has more fields: both are read.
func TestRecordsOfOtherBuilds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	now := time.Now().UTC().Format(time.RFC3339Nano)
	other := `[{"code":"connection_refused","detail":"a","first_seen":"` + now + `","last_seen":"` + now +
		`","count":2},` +
		`{"code":"edge_rate_limited","detail":"b","last_seen":"` + now + `","count":1,"of_a_later_build":{"x":[1]},` +
		`"retry_correlation_id":"../../etc","dedupe_key_hash":"forged","told":99}]`
	if err := os.WriteFile(path, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	got := open(t, path, nil).Entries()
	if len(got) != 2 || got[0].DedupeKeyHash != diag.KeyHash("connection_refused", "a") || got[0].Reported != 0 ||
		got[1].RetryCorrelationID != "" || got[1].DedupeKeyHash == "forged" || got[1].Reported != 1 {
		t.Errorf("%+v", got)
	}
}

// The mirror gets the records that are kept, as they are kept.
func TestMirror(t *testing.T) {
	var seen []diag.Entry
	l, err := diag.Open(diag.Config{
		Path: filepath.Join(t.TempDir(), "diag.json"), Mirror: func(e diag.Entry) { seen = append(seen, e) },
	})
	if err != nil {
		t.Fatal(err)
	}
	record(t, l, refused, "a")
	record(t, l, refused, "a")
	if len(seen) != 2 || seen[1].Count != 2 || seen[1] != l.Entries()[0] {
		t.Errorf("%+v", seen)
	}
}

// Records that are read are bounded and clean, and their codes are known, whatever the file contains.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`[{"code":"process_alive","detail":"x","last_seen":"2026-03-01T12:00:00Z","count":-4}]`))
	f.Add([]byte(`[{"code":"edge_rate_limited","detail":"a\u0000b","last_seen":"2026-03-01T11:00:00Z","told":1e9}]`))
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, err := diag.Parse(data, now)
		if err != nil {
			return
		}
		if len(entries) > diag.MaxRecords {
			t.Fatalf("%d entries", len(entries))
		}
		for _, e := range entries {
			_, unknown := names.Parse[commonv1.DiagnosticCode](e.Code)
			if unknown != nil || len(e.Detail) > diag.MaxDetail || strings.ContainsAny(e.Detail, "\x00\n\x1b") ||
				e.Count < 1 || e.Reported > e.Count || e.Reported < 0 || e.NextRetry < 0 ||
				e.RetryCorrelationID != "" && !ids.Valid(e.RetryCorrelationID) ||
				e.DedupeKeyHash != diag.KeyHash(e.Code, e.Detail) {
				t.Fatalf("%+v", e)
			}
		}
	})
}
