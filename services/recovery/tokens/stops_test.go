package tokens_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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

func (s *scene) scan(at *tokens.Stops) {
	s.t.Helper()
	if err := at.RunOnce(s.ctx); err != nil {
		s.t.Fatal(err)
	}
}

// want checks the lengths of the outages of nodeapi, in their order; -1 is one that lasts.
func (s *scene) want(lengths ...time.Duration) {
	s.t.Helper()
	s.wantOf("outage", lengths...)
}

// wantOf checks the lengths of the stops of a reason.
func (s *scene) wantOf(reason string, lengths ...time.Duration) {
	s.t.Helper()
	rows, err := s.pool.Query(s.ctx, `SELECT COALESCE(extract(epoch FROM until_at - from_at), -1)::float8
		FROM recovery.issuance_stop WHERE reason = $1 ORDER BY from_at`, reason)
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
		s.t.Fatalf("stops %s %v, want %v", reason, got, lengths)
	}
	for i := range got {
		if got[i] != lengths[i] {
			s.t.Fatalf("stops %s %v, want %v", reason, got, lengths)
		}
	}
}

// TestAnOutageIsAStop: the time without any replica of nodeapi, seen by recovery or not, is one row.
func TestAnOutageIsAStop(t *testing.T) {
	t.Run("seen", func(t *testing.T) {
		s := newScene(t)
		one := ids.New()
		s.scan(s.stops) // none has ever beaten
		s.beat(one)
		s.scan(s.stops)
		s.want()
		s.pass(time.Minute)
		for range 3 {
			s.scan(s.stops)
			s.scan(s.replica())
		}
		s.want(-1)
		s.pass(time.Hour)
		s.beat(one)
		s.scan(s.stops)
		s.scan(s.replica())
		s.want(time.Hour + time.Minute)
	})
	t.Run("recovery was down, and nodeapi was started anew", func(t *testing.T) {
		s := newScene(t)
		s.beat(ids.New())
		s.pass(2 * time.Hour)
		s.beat(ids.New())
		s.scan(s.replica())
		s.scan(s.stops)
		s.want(2 * time.Hour)
	})
	t.Run("the database was away, and the same replicas come back", func(t *testing.T) {
		s := newScene(t)
		one := ids.New()
		s.beat(one)
		s.scan(s.stops)
		s.pass(2 * time.Hour)
		s.beat(one)
		s.scan(s.stops)
		s.want(2 * time.Hour)
	})
	t.Run("a replica after another", func(t *testing.T) {
		s := newScene(t)
		s.beat(ids.New())
		for range 10 {
			s.pass(10 * time.Second)
			s.beat(ids.New())
			s.scan(s.stops)
		}
		s.want()
	})
}

// credit returns for how long a token that was issued at the beginning did not age.
func (s *scene) credit(since time.Time) time.Duration {
	s.t.Helper()
	w, err := tokens.Weigh(s.ctx, s.pool, &tokens.Row{IssuedAt: since})
	if err != nil {
		s.t.Fatal(err)
	}
	return time.Duration(w.Credit * float64(time.Second)).Round(time.Second)
}

func (s *scene) now() time.Time {
	s.t.Helper()
	var now time.Time
	if err := s.pool.QueryRow(s.ctx, `SELECT mesh.clock()`).Scan(&now); err != nil {
		s.t.Fatal(err)
	}
	return now
}

// TestRecoveryWasAway: the time in which no replica of recovery ran is one row, though nodeapi beat on, whichever
// replica looks first afterwards. Where it overlaps with an outage of nodeapi the time counts once.
func TestRecoveryWasAway(t *testing.T) {
	s := newScene(t)
	one, begin := ids.New(), s.now()
	beat := func(d time.Duration) {
		s.pass(d)
		s.beat(one)
	}
	s.beat(one)
	for range 5 {
		s.scan(s.stops)
		s.scan(s.replica())
		beat(10 * time.Second)
	}
	s.scan(s.stops)
	s.wantOf("recovery")
	for range 60 {
		beat(10 * time.Second)
	}
	s.scan(s.replica())
	s.scan(s.stops)
	s.want()
	s.wantOf("recovery", 10*time.Minute)
	if got := s.credit(begin); got != 10*time.Minute {
		t.Errorf("credit %s", got)
	}
	beat(2 * time.Hour) // the database was away, or everything was
	s.scan(s.stops)
	s.want(2 * time.Hour)
	s.wantOf("recovery", 10*time.Minute, 2*time.Hour)
	if got := s.credit(begin); got != 2*time.Hour+10*time.Minute {
		t.Errorf("credit %s", got)
	}
}

// TestReplicasThatScanTogether checks that of several replicas which come back at once one writes the stop.
func TestReplicasThatScanTogether(t *testing.T) {
	s := newScene(t)
	s.beat(ids.New())
	s.scan(s.stops)
	s.pass(time.Hour)
	failures := make(chan error)
	const replicas = 6
	for range replicas {
		other := s.replica()
		go func() { failures <- other.RunOnce(s.ctx) }()
	}
	for range replicas {
		if err := <-failures; err != nil {
			t.Error(err)
		}
	}
	s.wantOf("recovery", time.Hour)
}

// TestTheAuthorityWasAway: a time without the authority is one row, however many replicas and checks find it. It ends
// with the check that finds the authority again, or by itself once no replica that knows of it makes checks.
func TestTheAuthorityWasAway(t *testing.T) {
	s := newScene(t)
	begin := s.now()
	note := func(from, until time.Time) {
		t.Helper()
		if err := pg.InTx(s.ctx, s.pool, func(ctx context.Context, tx pgx.Tx) error {
			return tokens.Unanswered(ctx, tx, from, until)
		}); err != nil {
			t.Fatal(err)
		}
	}
	const bound = 2 * time.Minute
	note(time.Time{}, begin) // none has begun
	s.wantOf("authority")
	note(begin, time.Time{})
	s.wantOf("authority", bound)
	for n := range 60 {
		s.pass(time.Minute)
		note(begin.Add(time.Duration(n/2)*time.Minute), time.Time{}) // the next holders of the lease find it too
	}
	s.wantOf("authority", time.Hour+bound)
	if got := s.credit(begin); got != time.Hour {
		t.Errorf("credit %s while it lasts", got)
	}
	note(time.Time{}, begin.Add(time.Hour))
	s.pass(time.Hour)
	s.wantOf("authority", time.Hour)
	if got := s.credit(begin); got != time.Hour {
		t.Errorf("credit %s afterwards", got)
	}
	note(s.now(), time.Time{})
	s.pass(5 * time.Hour) // a build that does not know of it runs
	if got := s.credit(begin); got != time.Hour+bound {
		t.Errorf("credit %s after a time in which no replica continued it", got)
	}
	note(s.now(), time.Time{})
	note(time.Time{}, s.now())
	s.wantOf("authority", time.Hour, bound, 0)
}

// TestAStopOfTheAuthorityWithoutAnEndIsContinued checks that a stop is continued which a build began that set no end to
// it.
func TestAStopOfTheAuthorityWithoutAnEndIsContinued(t *testing.T) {
	for name, c := range map[string]struct {
		back bool
		want time.Duration
	}{"the authority is away": {false, time.Hour + 2*time.Minute}, "it is back": {true, time.Hour}} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			if _, err := s.pool.Exec(s.ctx, `INSERT INTO recovery.issuance_stop (stop_id, reason, from_at)
				VALUES ($1, 'authority', mesh.clock())`, ids.New()); err != nil {
				t.Fatal(err)
			}
			s.pass(time.Hour)
			from, until := s.now(), time.Time{}
			if c.back {
				from, until = until, from
			}
			if err := pg.InTx(s.ctx, s.pool, func(ctx context.Context, tx pgx.Tx) error {
				return tokens.Unanswered(ctx, tx, from, until)
			}); err != nil {
				t.Fatal(err)
			}
			s.wantOf("authority", c.want)
		})
	}
}
