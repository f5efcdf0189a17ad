package beat

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBeatsAreNoEvents checks that a minute of a replica's beats is thirteen writes of its row and one event, that the
// replica has started. There are further events when it is back after a silence, and when it leaves.
func TestBeatsAreNoEvents(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	pool, replicaID, beats := db.Pool(pg.RoleNodeAPI), ids.New(), 0
	p := New(Deps{
		Logger: testkit.Logger(t), DB: pool, ReplicaID: replicaID, Address: "127.0.0.1:1", Wake: func() {},
		Counts: func() (int, int) { return 0, 0 }, Back: func() {}, OnTime: func(time.Time, time.Time, time.Time) { beats++ },
	})
	now := time.Now()
	p.now = func() time.Time { return now }
	events := func(when string, want int) {
		t.Helper()
		var got int
		if err := pool.QueryRow(t.Context(),
			`SELECT count(*) FROM events.event WHERE kind = 'replica.beat' AND aggregate_id = $1`,
			replicaID).Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%s: %d events of the replica, not %d", when, got, want)
		}
	}
	for range 13 {
		p.beat(t.Context(), false)
		now = now.Add(5 * time.Second)
	}
	events("after a minute", 1)
	var version int64
	if err := pool.QueryRow(t.Context(), `SELECT version FROM mesh.replica WHERE replica_id = $1`,
		replicaID).Scan(&version); err != nil || version != 13 || beats != 13 {
		t.Errorf("%d beats are known, the row is of version %d, %v", beats, version, err)
	}
	now = now.Add(20 * time.Second)
	p.beat(t.Context(), false)
	events("after a silence", 2)
	p.beat(t.Context(), true)
	events("on leaving", 3)
	p.beat(t.Context(), false) // of a tick that came while it left
	var leaving bool
	if err := pool.QueryRow(t.Context(), `SELECT leaving FROM mesh.replica WHERE replica_id = $1`,
		replicaID).Scan(&leaving); err != nil || !leaving {
		t.Errorf("after a beat that followed the last one the replica is leaving %t, %v", leaving, err)
	}
}

// TestAReplicaIsBackOnceAfterASilence checks that a replica is told that it is back by the beat that follows a silence
// in which it counted as gone by the database's clock, and neither by its first beat nor by its last.
func TestAReplicaIsBackOnceAfterASilence(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	testkit.StopClock(db)
	backs, at := 0, time.Duration(0)
	p := New(Deps{
		Logger: testkit.Logger(t), DB: db.Pool(pg.RoleNodeAPI), ReplicaID: ids.New(), Address: "127.0.0.1:1", Wake: func() {},
		Counts: func() (int, int) { return 0, 0 }, Back: func() { backs++ }, OnTime: func(time.Time, time.Time, time.Time) {},
	})
	for _, step := range []struct {
		when    string
		after   time.Duration
		leaving bool
		want    int
	}{
		{when: "the first beat"},
		{when: "a beat in time", after: 5 * time.Second},
		{when: "a late beat", after: replicas.SilentAfter - time.Second},
		{when: "a beat after a silence", after: replicas.SilentAfter, want: 1},
		{when: "the beat after it", after: 5 * time.Second, want: 1},
		{when: "the last beat, after a silence", after: time.Minute, leaving: true, want: 1},
	} {
		at += step.after
		testkit.SetClockOffset(db, at)
		p.beat(t.Context(), step.leaving)
		if backs != step.want {
			t.Errorf("%s: it was back %d times, want %d", step.when, backs, step.want)
		}
	}
}
