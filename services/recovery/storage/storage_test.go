package storage_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/storage"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const gib = 1 << 30

func TestProblem(t *testing.T) {
	week := 7 * 24 * time.Hour
	for name, c := range map[string]struct {
		size      storage.Size
		ill, kept bool // for a database that was well, and for one with an incident
	}{
		"no limit":           {storage.Size{Bytes: 900 * gib}, false, false},
		"half":               {storage.Size{Bytes: 50 * gib, Limit: 100 * gib}, false, false},
		"between":            {storage.Size{Bytes: 77 * gib, Limit: 100 * gib}, false, true},
		"four fifths":        {storage.Size{Bytes: 80 * gib, Limit: 100 * gib}, true, true},
		"over":               {storage.Size{Bytes: 120 * gib, Limit: 100 * gib}, true, true},
		"grows fast":         {storage.Size{Bytes: 60 * gib, Limit: 100 * gib, Was: 10 * gib, Span: week}, true, true},
		"grows fast and new": {storage.Size{Bytes: 20 * gib, Limit: 100 * gib, Was: 0, Span: 24 * time.Hour}, false, false},
		"not watched enough": {storage.Size{Bytes: 60 * gib, Limit: 100 * gib, Was: 50 * gib, Span: time.Hour}, false, false},
		"seven and a half": {
			storage.Size{Bytes: 40 * gib, Limit: 100 * gib, Was: 32 * gib, Span: 24 * time.Hour}, false, true,
		},
		"shrinks": {storage.Size{Bytes: 60 * gib, Limit: 100 * gib, Was: 70 * gib, Span: week}, false, false},
	} {
		if got := c.size.Problem(false); (got != "") != c.ill {
			t.Errorf("%s: problem %q, want one: %t", name, got, c.ill)
		}
		if got := c.size.Problem(true); (got != "") != c.kept {
			t.Errorf("%s with an incident: problem %q, want one: %t", name, got, c.kept)
		}
	}
}

// TestIncidentBeforeTheDiskIsFull: the volume has little room, then more; the incident is opened once and closed.
func TestIncidentBeforeTheDiskIsFull(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	free := int64(1 << 20)
	w := storage.Watch{
		DB: db.Pool(pg.RoleRecovery), Policy: policy.NewSource(nil, testkit.Logger(t), policy.SourceConfig{}),
		Volume: "anywhere", Free: func(string) (int64, error) { return free, nil },
	}
	count := func(open bool) int {
		t.Helper()
		var n int
		err := db.OwnerPool().QueryRow(t.Context(), `SELECT count(*) FROM recovery.incident
			WHERE kind = 'storage' AND severity = 'p1' AND (closed_at IS NULL) = $1`, open).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	measure := func() bool {
		t.Helper()
		appended, err := w.Measure(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return appended
	}
	if !measure() || count(true) != 1 {
		t.Fatalf("%d incidents are open, want 1", count(true))
	}
	measure()
	if count(true) != 1 {
		t.Fatalf("%d incidents are open after another look, want 1", count(true))
	}
	// A process without access to the volume and without a limit of its own does not end the incident, and goes on using
	// the limit that was found.
	blind := w
	blind.Volume = ""
	if appended, err := blind.Measure(t.Context()); err != nil || appended || count(true) != 1 {
		t.Fatalf("%d incidents are open after a look without the volume, told %t, error %v", count(true), appended, err)
	}
	if _, err := db.OwnerPool().Exec(t.Context(),
		`UPDATE mesh.storage_sample SET at = at - interval '2 hours'`); err != nil {
		t.Fatal(err)
	}
	if appended, err := blind.Measure(t.Context()); err != nil || appended || count(true) != 1 {
		t.Fatalf("%d incidents are open after a look without any limit, told %t, error %v", count(true), appended, err)
	}
	free = 1 << 40
	if !measure() || count(true) != 0 || count(false) != 1 {
		t.Fatalf("%d incidents are open and %d closed, want 0 and 1", count(true), count(false))
	}
	if measure() {
		t.Error("a look at a database with room appended events")
	}
	var samples, events int
	err := db.Pool(pg.RoleReadmodel).QueryRow(t.Context(), `SELECT (SELECT count(*) FROM mesh.storage_sample),
		(SELECT count(*) FROM events.event WHERE kind = 'incident.changed')`).Scan(&samples, &events)
	if err != nil || samples != 6 || events < 2 {
		t.Fatalf("%d samples and %d events, error %v", samples, events, err)
	}
}
