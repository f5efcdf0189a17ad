package facts_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/nodeapi/facts"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// replica is the writer of facts of a replica.
func replica(t *testing.T, pool *pgxpool.Pool) *facts.Writer {
	t.Helper()
	return facts.New(facts.Deps{Logger: testkit.Logger(t), DB: pool, Wake: func() {}})
}

// written returns the versions of the observations in the order in which they were written.
func written(t *testing.T, pool *pgxpool.Pool) []int64 {
	t.Helper()
	rows, err := pool.Query(testkit.Context(t),
		`SELECT aggregate_version FROM events.event WHERE kind = 'workload.observed' ORDER BY seq`)
	if err != nil {
		t.Fatal(err)
	}
	versions, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		t.Fatal(err)
	}
	return versions
}

// now returns the database's time in the unit of observations' versions.
func now(t *testing.T, pool *pgxpool.Pool) int64 {
	t.Helper()
	at, _, err := testkit.Clock(testkit.Context(t), pool)
	if err != nil {
		t.Fatal(err)
	}
	return at.UnixMicro()
}

// TestObservationsAreVersionedByTheDatabasesClock: with the clock of a replica that is ahead, its observations would
// hide those that another replica writes later (R11).
func TestObservationsAreVersionedByTheDatabasesClock(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleNodeAPI)
	for _, behind := range []time.Duration{time.Hour, -time.Hour} {
		testkit.SetClockOffset(db, -behind)
		w := replica(t, pool)
		from := now(t, pool)
		for range 3 {
			w.Observed(ids.New(), ids.New(), 1, &nodev1.Observation{WorkspaceId: ids.New(), Epoch: 1})
		}
		w.Leave(ctx)
		to := now(t, pool)
		versions := written(t, pool)
		if len(versions) < 3 {
			t.Fatalf("%d observations were written, want 3", len(versions))
		}
		for _, version := range versions[len(versions)-3:] {
			if version < from || version > to {
				t.Errorf("the database's clock is %s behind: version %s, want one between %s and %s",
					behind, time.UnixMicro(version).UTC(), time.UnixMicro(from).UTC(), time.UnixMicro(to).UTC())
			}
		}
	}
}

// TestAnObservationThatWaitedForTheDatabaseIsOver: a replica that could not reach the database must not write an
// observation from before the agent moved to another replica.
func TestAnObservationThatWaitedForTheDatabaseIsOver(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleNodeAPI)
	node, workspace := ids.New(), ids.New()
	cut, other := replica(t, pool), replica(t, pool)
	cut.Observed(node, ids.New(), 1, &nodev1.Observation{WorkspaceId: workspace, Epoch: 1})
	away, cancel := context.WithCancel(ctx)
	cancel()
	for range 2 {
		cut.Leave(away)
	}
	from := now(t, pool)
	other.Observed(node, ids.New(), 2, &nodev1.Observation{WorkspaceId: workspace, Epoch: 2})
	for _, w := range []*facts.Writer{other, cut} {
		w.Leave(ctx)
	}
	if versions := written(t, pool); len(versions) != 1 || versions[0] < from {
		t.Errorf("observations of versions %v were written, want that of the later session alone", versions)
	}
}
