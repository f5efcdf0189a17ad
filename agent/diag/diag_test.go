package diag_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/gpuaas/mesh/agent/diag"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

const (
	refused = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	polled  = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
)

func open(t *testing.T, path string, now func() time.Time) *diag.Log {
	t.Helper()
	testkit.IO(t)
	l, err := diag.Open(diag.Config{Path: path, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func record(t *testing.T, l *diag.Log, code commonv1.DiagnosticCode, detail string) {
	t.Helper()
	if _, err := l.Record(code, detail, 3*time.Second); err != nil {
		t.Fatal(err)
	}
}

func TestRecordAndReadBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	clock := func() time.Time { return now }
	l := open(t, path, clock)
	for range 3 {
		record(t, l, refused, "dial 10.0.0.1:443: refused")
		now = now.Add(time.Second)
	}
	record(t, l, polled, "stream broke")
	record(t, l, refused, "dial 10.0.0.1:443: refused")
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("file: %v, %v", info, err)
	}
	got := open(t, path, clock).Entries()
	if len(got) != 2 || got[1].Count != 4 || got[1].Code != "connection_refused" || got[1].NextRetry != 3*time.Second ||
		!got[1].LastSeen.After(got[1].FirstSeen) || got[0].Code != "task_poll_failed" || got[0].Count != 1 {
		t.Errorf("entries %+v", got)
	}
	recent := open(t, path, clock).Since(now.Add(-1500*time.Millisecond), 0)
	if len(recent) != 2 || recent[1].GetCode() != refused || recent[1].GetCount() != 4 {
		t.Errorf("since: %v", recent)
	}
	if last := open(t, path, clock).Since(time.Time{}, 1); len(last) != 1 || last[0].GetCount() != 4 {
		t.Errorf("the newest: %v", last)
	}
	now = now.Add(diag.MaxAge + time.Hour)
	if got := open(t, path, clock).Entries(); len(got) != 0 {
		t.Errorf("old ones: %+v", got)
	}
}

func TestBounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diag.json")
	l := open(t, path, nil)
	for i := range diag.MaxRecords + 20 {
		record(t, l, refused, fmt.Sprint(i, strings.Repeat("é", 2000)))
	}
	info, err := os.Stat(path)
	if err != nil || info.Size() > diag.MaxBytes {
		t.Errorf("size: %v, %v", info, err)
	}
	got := l.Entries()
	if len(got) > diag.MaxRecords || !strings.HasPrefix(got[len(got)-1].Detail, fmt.Sprint(diag.MaxRecords+19)) {
		t.Errorf("%d entries, last %q", len(got), got[len(got)-1].Detail)
	}
	for _, e := range got {
		if len(e.Detail) > diag.MaxDetail || !utf8.ValidString(e.Detail) {
			t.Fatalf("detail of %d bytes", len(e.Detail))
		}
	}
}

// A record that was forged or damaged is evidence at most, and never keeps the agent from starting.
func TestForged(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret,
		[]byte(`[{"code":"process_alive","detail":"secret","last_seen":"2999-01-01T00:00:00Z"}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]func(path string) error{
		"link":     func(path string) error { return os.Symlink(secret, path) },
		"noise":    func(path string) error { return os.WriteFile(path, []byte("{{{"), 0o600) },
		"oversize": func(path string) error { return os.WriteFile(path, make([]byte, diag.MaxBytes+1), 0o600) },
		"directory": func(path string) error {
			return os.Mkdir(path, 0o700)
		},
	}
	for name, forge := range tests {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "diag.json")
			if err := forge(path); err != nil {
				t.Fatal(err)
			}
			l := open(t, path, nil)
			if got := l.Entries(); len(got) != 0 {
				t.Errorf("believed: %+v", got)
			}
			record(t, l, refused, "mine")
			if got := open(t, path, nil).Entries(); len(got) != 1 || got[0].Detail != "mine" {
				t.Errorf("entries %+v", got)
			}
		})
	}
	path := filepath.Join(dir, "future")
	forged := `[{"code":"process_alive","detail":"future","last_seen":"2999-01-01T00:00:00Z"},` +
		`{"code":"made_up","detail":"x","last_seen":"` +
		time.Now().Format(time.RFC3339) + `"},{"code":"process_alive","detail":"gbt_00_abc\u0007","count":-4,"last_seen":"` +
		time.Now().Format(time.RFC3339) + `"}]`
	if err := os.WriteFile(path, []byte(forged), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := open(t, path, nil).Entries(); len(got) != 1 || got[0].Detail != "[token]" || got[0].Count != 1 {
		t.Errorf("entries %+v", got)
	}
}

func TestSanitise(t *testing.T) {
	tests := []struct{ in, want string }{
		{"dial tcp 10.0.0.1:443: connection refused", "dial tcp 10.0.0.1:443: connection refused"},
		{"GET https://api.example.com/v1/x?token=abc&y=1: 429", "GET https://api.example.com/v1/x 429"},
		{"https://user:pw@host/path", "https://host/path"},
		{"token gbt_0123456789abcdef_Zm9vYmFy was refused", "token [token] was refused"},
		{"sent eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln to it", "sent [token] to it"},
		{"Authorization: Bearer abc.def-ghi", "Authorization: [secret] [secret]"},
		{"password=hunter2, user=x", "password=[secret], user=x"},
		{"key -----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY----- end", "key [pem] end"},
		{"cut -----BEGIN PRIVATE KEY-----\nMIIE", "cut [pem]"},
		{"a\nb\tc\x00d\x1b[31m\u202ee", "a b cd[31me"},
		{"bad \xff utf", "bad \uFFFD utf"},
	}
	for _, tt := range tests {
		if got := diag.Sanitise(tt.in); got != tt.want {
			t.Errorf("Sanitise(%q) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestSanitiseIsStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := rapid.OneOf(rapid.String(),
			rapid.SampledFrom([]string{"https://a/b?c", "password=a", "gbt_1_x", "Bearer x y"})).Draw(t, "in")
		once := diag.Sanitise(in)
		if len(once) > diag.MaxDetail || !utf8.ValidString(once) || strings.ContainsAny(once, "\n\x00") {
			t.Fatalf("%q", once)
		}
	})
}
