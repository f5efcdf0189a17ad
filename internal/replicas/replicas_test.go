package replicas_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestListeningGoesOnWhileReplicasOverlap: a replica takes the beginning of listening over from the replicas with a
// recent beat, and begins anew after a gap.
func TestListeningGoesOnWhileReplicasOverlap(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	beat := func(at time.Duration, replica string, leaving bool) replicas.Written {
		t.Helper()
		testkit.SetClockOffset(db, at)
		w, err := replicas.Write(t.Context(), db.Pool(pg.RoleNodeAPI),
			replicas.Beat{ReplicaID: replica, Address: "here:1", Leaving: leaving})
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	since := func() time.Time {
		t.Helper()
		var at time.Time
		err := db.Pool(pg.RoleRecovery).QueryRow(t.Context(),
			`SELECT listening_since FROM mesh.replica ORDER BY beat_at DESC LIMIT 1`).Scan(&at)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	first, second := ids.New(), ids.New()
	began := beat(0, first, false)
	if got := since(); !got.Equal(began.BeatAt) {
		t.Errorf("the first replica listens since %s, and beat at %s", got, began.BeatAt)
	}
	beat(15*time.Second, first, true)
	if w := beat(30*time.Second, second, false); w.StartedAt != w.BeatAt || w.Version != 1 {
		t.Errorf("the first beat of the second replica: %+v", w)
	}
	if got := since(); !got.Equal(began.BeatAt) {
		t.Errorf("after a replacement a replica listens since %s, not since %s", got, began.BeatAt)
	}
	if w := beat(45*time.Second, second, false); w.StartedAt.Equal(w.BeatAt) || w.Version != 2 {
		t.Errorf("the second beat of the second replica: %+v", w)
	}
	again := beat(66*time.Second, second, false)
	if got := since(); !got.Equal(again.BeatAt) {
		t.Errorf("after a gap of 21 s a replica listens since %s, not since %s", got, again.BeatAt)
	}
}

// TestOnlyNodeapiWritesItsRows: the other services read them.
func TestOnlyNodeapiWritesItsRows(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	testkit.Beat(db, ids.New(), "", 0, false)
	for _, role := range []string{pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel} {
		if _, err := db.Pool(role).Exec(t.Context(), `UPDATE mesh.replica SET beat_at = mesh.clock()`); err == nil {
			t.Errorf("%s writes beats", role)
		}
		var rows int
		if err := db.Pool(role).QueryRow(t.Context(), `SELECT count(*) FROM mesh.replica`).Scan(&rows); err != nil ||
			rows != 1 {
			t.Errorf("%s reads %d rows: %v", role, rows, err)
		}
	}
	if _, err := db.Pool(pg.RoleNodeAPI).Exec(t.Context(),
		`INSERT INTO mesh.replica (service, replica_id, started_at, beat_at, listening_since, version)
		SELECT 'recovery', gen_random_uuid(), c, c, c, 1 FROM mesh.clock() c`); err == nil {
		t.Error("nodeapi writes rows of another service")
	}
}

// TestBeatsAreHeapOnly: a beat in place touches no index, so that a year of them leaves the table as small as it was.
func TestBeatsAreHeapOnly(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, replica := db.Pool(pg.RoleNodeAPI), ids.New()
	for range 20 {
		if _, err := replicas.Write(t.Context(), pool, replicas.Beat{ReplicaID: replica}); err != nil {
			t.Fatal(err)
		}
	}
	var updated, hot int
	testkit.Eventually(t, time.Minute, func() error {
		if _, err := pool.Exec(t.Context(), `SELECT pg_stat_force_next_flush()`); err != nil {
			return err
		}
		err := db.OwnerPool().QueryRow(t.Context(),
			`SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = 'mesh.replica'::regclass`).Scan(&updated,
			&hot)
		if err == nil && updated < 19 {
			return fmt.Errorf("%d updates are counted", updated)
		}
		return err
	})
	if hot != updated {
		t.Errorf("%d of %d beats were heap-only", hot, updated)
	}
}
