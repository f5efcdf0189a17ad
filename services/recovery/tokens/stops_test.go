package tokens_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	beats "github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/tokens"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// scene is a mesh whose clock stands still, with replicas of nodeapi that beat when told.
type scene struct {
	t     *testing.T
	ctx   context.Context
	db    *testkit.Database
	pool  *pgxpool.Pool
	stops *tokens.Stops
	ahead time.Duration
}

func newScene(t *testing.T) *scene {
	t.Helper()
	testkit.IO(t)
	s := &scene{t: t, ctx: testkit.Context(t), db: testkit.DB(t)}
	s.pool = s.db.Pool(pg.RoleRecovery)
	testkit.StopClock(s.db)
	s.stops = s.replica()
	return s
}

// replica returns the stops of another replica of recovery.
func (s *scene) replica() *tokens.Stops {
	s.t.Helper()
	stops, err := tokens.NewStops(s.pool, testkit.Logger(s.t))
	if err != nil {
		s.t.Fatal(err)
	}
	return stops
}

func (s *scene) pass(d time.Duration) {
	s.t.Helper()
	s.ahead += d
	testkit.SetClockOffset(s.db, s.ahead)
}

func (s *scene) beat(replica string) {
	s.t.Helper()
	if _, err := beats.Write(s.ctx, s.db.Pool(pg.RoleNodeAPI), beats.Beat{ReplicaID: replica}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *scene) look(at *tokens.Stops) {
	s.t.Helper()
	if err := at.RunOnce(s.ctx); err != nil {
		s.t.Fatal(err)
	}
}

// want checks the lengths of the stops, in their order; -1 is one that lasts.
func (s *scene) want(lengths ...time.Duration) {
	s.t.Helper()
	rows, err := s.pool.Query(s.ctx, `SELECT COALESCE(extract(epoch FROM until_at - from_at), -1)::float8
		FROM recovery.issuance_stop ORDER BY from_at`)
	if err != nil {
		s.t.Fatal(err)
	}
	defer rows.Close()
	var got []time.Duration
	for rows.Next() {
		var seconds float64
		if err := rows.Scan(&seconds); err != nil {
			s.t.Fatal(err)
		}
		if seconds < 0 {
			got = append(got, -1)
			continue
		}
		got = append(got, time.Duration(seconds*float64(time.Second)).Round(time.Second))
	}
	if err := rows.Err(); err != nil {
		s.t.Fatal(err)
	}
	if len(got) != len(lengths) {
		s.t.Fatalf("stops %v, want %v", got, lengths)
	}
	for i := range got {
		if got[i] != lengths[i] {
			s.t.Fatalf("stops %v, want %v", got, lengths)
		}
	}
}

// TestAnOutageIsAStop: the time without any replica of nodeapi, seen by recovery or not, is one row.
func TestAnOutageIsAStop(t *testing.T) {
	t.Run("seen", func(t *testing.T) {
		s := newScene(t)
		one := ids.New()
		s.look(s.stops) // none has ever beaten
		s.beat(one)
		s.look(s.stops)
		s.want()
		s.pass(time.Minute)
		for range 3 {
			s.look(s.stops)
			s.look(s.replica())
		}
		s.want(-1)
		s.pass(time.Hour)
		s.beat(one)
		s.look(s.stops)
		s.look(s.replica())
		s.want(time.Hour + time.Minute)
	})
	t.Run("recovery was down, and nodeapi was started anew", func(t *testing.T) {
		s := newScene(t)
		s.beat(ids.New())
		s.pass(2 * time.Hour)
		s.beat(ids.New())
		s.look(s.replica())
		s.look(s.stops)
		s.want(2 * time.Hour)
	})
	t.Run("the database was away, and the same replicas come back", func(t *testing.T) {
		s := newScene(t)
		one := ids.New()
		s.beat(one)
		s.look(s.stops)
		s.pass(2 * time.Hour)
		s.beat(one)
		s.look(s.stops)
		s.want(2 * time.Hour)
	})
	t.Run("a replica after another", func(t *testing.T) {
		s := newScene(t)
		s.beat(ids.New())
		for range 10 {
			s.pass(10 * time.Second)
			s.beat(ids.New())
			s.look(s.stops)
		}
		s.want()
	})
}
