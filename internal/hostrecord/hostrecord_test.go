package hostrecord_test

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/gpuaas/mesh/internal/hostrecord"
)

func TestBothFormsOfARecord(t *testing.T) {
	forms := map[string]string{
		"the agent's file": `[{"code":"edge_rate_limited","detail":"429","first_seen":"2026-03-01T12:00:00Z",` +
			`"last_seen":"2026-03-01T12:05:00.5Z","count":3,"next_retry_nanoseconds":60000000000,"later":{"a":1},` +
			`"retry_correlation_id":"c","dedupe_key_hash":"h"}]`,
		"what diag prints": `{"items":[{"code":"edge_rate_limited","detail":"429","first_seen":"2026-03-01T12:00:00Z",` +
			`"last_seen":"2026-03-01T12:05:00.5Z","count":3,"next_retry_seconds":60,"retry_correlation_id":"c",` +
			`"dedupe_key_hash":"h"}]}`,
	}
	for name, form := range forms {
		got, err := hostrecord.Read(strings.NewReader(form))
		if err != nil || len(got) != 1 {
			t.Errorf("%s: %v, %v", name, got, err)
			continue
		}
		r := got[0]
		if r.GetCode() != "edge_rate_limited" || r.GetDetail() != "429" || r.GetCount() != 3 ||
			r.GetNextRetry().AsDuration() != time.Minute || r.GetEndedAt() != nil || r.GetRetryCorrelationId() != "c" ||
			r.GetDedupeKeyHash() != "h" ||
			!r.GetLastSeenAt().AsTime().Equal(time.Date(2026, 3, 1, 12, 5, 0, 5e8, time.UTC)) {
			t.Errorf("%s: %v", name, r)
		}
	}
}

func TestWhatIsNoRecord(t *testing.T) {
	for _, text := range []string{
		"", "{", "null", "7", `"text"`, "[]", `{"items":[]}`, `{"items":7}`, `{"other":[]}`, `[7,{"detail":"no code"}]`,
		strings.Repeat(" ", hostrecord.MaxBytes+1),
	} {
		if got, err := hostrecord.Read(strings.NewReader(text)); err == nil {
			t.Errorf("%.20q: %v", text, got)
		}
	}
	got, err := hostrecord.Parse([]byte(`[{"code":"a","last_seen":"yesterday","count":"many","next_retry_seconds":-1},` +
		`{"code":7},{"code":"b","detail":["x"],"ended_at":"9999999-01-01T00:00:00Z"}]`))
	if err != nil || len(got) != 2 || got[0].GetLastSeenAt() != nil || got[0].GetCount() != 0 ||
		got[0].GetNextRetry() != nil || got[1].GetDetail() != "" || got[1].GetEndedAt() != nil {
		t.Errorf("%v, %v", got, err)
	}
}

// Whatever is read is bounded and can be sent.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`[{"code":"process_alive","detail":"x","last_seen":"2999-01-01T00:00:00Z","count":-4}]`))
	f.Add([]byte(`{"items":[{"code":"edge_rate_limited","next_retry_seconds":1e308}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := hostrecord.Parse(data)
		if err == nil && len(list) == 0 || len(list) > hostrecord.MaxEntries {
			t.Fatalf("%d entries, %v", len(list), err)
		}
		for _, r := range list {
			for _, text := range []string{r.GetCode(), r.GetDetail(), r.GetRetryCorrelationId(), r.GetDedupeKeyHash()} {
				if !utf8.ValidString(text) || len(text) > 1024 {
					t.Fatalf("%q", text)
				}
			}
			if r.GetCount() < 0 || r.GetNextRetry().AsDuration() < 0 || r.GetNextRetry().AsDuration() > 24*time.Hour ||
				r.GetLastSeenAt() != nil && r.GetLastSeenAt().CheckValid() != nil {
				t.Fatalf("%v", r)
			}
		}
	})
}
