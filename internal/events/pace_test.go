package events_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// rounds counts the rounds of a loop within a simulated minute.
func rounds(t *testing.T, s *events.Signal, during func(ctx context.Context)) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute-time.Millisecond)
	defer cancel()
	if during != nil {
		go during(ctx)
	}
	n := 0
	for {
		wake := s.C()
		n++
		if !s.Pace(ctx, nil, wake, time.Second) {
			return n
		}
	}
}

// TestALoopIsQuietWhileAConnectionListens checks how often a loop runs in a minute: every second while no connection
// listens, every ten seconds while one does, never more often than every second however many notifications come, and at
// once when the connection is lost.
func TestALoopIsQuietWhileAConnectionListens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s events.Signal
		if n := rounds(t, &s, nil); n != 60 {
			t.Errorf("%d rounds a minute while nothing listens", n)
		}
		lost := events.Listen(&s)
		if n := rounds(t, &s, nil); n != 6 {
			t.Errorf("%d rounds a minute while a connection listens", n)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute-time.Millisecond)
		n := 1
		for s.PaceWithin(ctx, nil, s.C(), time.Second, 3*time.Second) {
			n++
		}
		cancel()
		if n != 20 {
			t.Errorf("%d rounds a minute of a loop that looks every three seconds", n)
		}
		storm := func(ctx context.Context) {
			for ctx.Err() == nil {
				s.Notify()
				time.Sleep(10 * time.Millisecond) // simulated
			}
		}
		if n = rounds(t, &s, storm); n < 55 || n > 60 {
			t.Errorf("%d rounds a minute of a storm", n)
		}
		began := time.Now()
		wake := s.C()
		go func() {
			time.Sleep(3 * time.Second) // simulated
			lost()
		}()
		if !s.Pace(t.Context(), nil, wake, time.Second) || time.Since(began) != 3*time.Second {
			t.Errorf("the loss of the connection was found after %s", time.Since(began))
		}
		if s.Listening() || s.Period(time.Second) != time.Second {
			t.Error("it listens still")
		}
		now := make(chan struct{})
		close(now)
		began = time.Now()
		if !s.Pace(t.Context(), now, nil, time.Hour) || time.Since(began) != 0 {
			t.Errorf("what wakes at once took %s", time.Since(began))
		}
	})
}

// TestAReadingIsDue: without a listener a value is due after the short time; with one after ten seconds, or after the
// short time once there was a notification since it was read.
func TestAReadingIsDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var none *events.Signal
		var s events.Signal
		if !(events.Reading{}).Due(time.Hour) || !none.Reading().Due(0) {
			t.Error("what was never read, or is not notified, is not due")
		}
		due := func(r events.Reading, after time.Duration) {
			t.Helper()
			time.Sleep(after - time.Nanosecond) // simulated
			if r.Due(time.Second) {
				t.Errorf("it is due before %s", after)
			}
			time.Sleep(time.Nanosecond)
			if !r.Due(time.Second) {
				t.Errorf("it is not due after %s", after)
			}
		}
		due(s.Reading(), time.Second)
		lost := events.Listen(&s)
		due(s.Reading(), 10*time.Second)
		r := s.Reading()
		s.Notify()
		due(r, time.Second)
		r = s.Reading()
		time.Sleep(2 * time.Second) // simulated
		if lost(); !r.Due(time.Second) {
			t.Error("it is not due when the listener is lost")
		}
	})
}

// TestALostListenerIsKnown checks that a signal listens exactly while the connection is alive: when the server ends it
// the loops are woken, and poll at their short period until the next connection listens.
func TestALostListenerIsKnown(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	var numbered, settings events.Signal
	var cut atomic.Bool
	config, err := pgxpool.ParseConfig(d.URL(pg.RoleLifecycle))
	if err != nil {
		t.Fatal(err)
	}
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if cut.Load() {
			return errors.New("the network is cut")
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	l, err := events.NewListener(events.ListenerDeps{
		Pool: pool, Numbered: &numbered, Settings: &settings, Logger: testkit.Logger(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	start(t, l.Run)
	listens := func(want bool) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			if numbered.Listening() != want {
				return fmt.Errorf("listening: %v", !want)
			}
			return nil
		})
	}
	listens(true)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.WithoutCancel(ctx))
	cut.Store(true) // no new connection either, so that it stays lost
	woken := numbered.C()
	if _, err := admin.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND query LIKE '%LISTEN%'
		AND pid <> pg_backend_pid()`); err != nil {
		t.Fatal(err)
	}
	select {
	case <-woken:
	case <-ctx.Done():
		t.Fatal(errors.New("nothing was woken"))
	}
	listens(false)
	cut.Store(false)
	listens(true)
}

// TestASequencerLingers checks how many rounds many commits in a short time cost: one every 40 ms, and one every 10 ms
// while a caller waits for each commit. A commit after a pause is numbered at once.
func TestASequencerLingers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name  string
			every time.Duration
			urged bool
			want  int
		}{
			{"of a storm", 5 * time.Millisecond, false, 25},
			{"of a storm that is waited for", 5 * time.Millisecond, true, 100},
			{"of a commit now and then", 100 * time.Millisecond, false, 10},
		} {
			var wake events.Signal
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			go func() {
				for ctx.Err() == nil {
					time.Sleep(c.every) // simulated
					if c.urged {
						wake.Urge()
					} else {
						wake.Notify()
					}
				}
			}()
			if n := events.Paced(ctx, &wake); n < c.want-1 || n > c.want+1 {
				t.Errorf("%d rounds a second %s; want %d", n, c.name, c.want)
			}
			cancel()
		}
		var wake events.Signal
		ctx, cancel := context.WithTimeout(t.Context(), 501*time.Millisecond)
		defer cancel()
		time.AfterFunc(500*time.Millisecond, wake.Notify)
		if n := events.Paced(ctx, &wake); n != 2 {
			t.Errorf("%d rounds, with one commit after a rest; it is to be numbered at once", n)
		}
	})
}

// TestASequencerIsUrgedByWhoWaits checks that a sequencer with a linger of an hour numbers an event at once if WaitFor
// waits for it, and not otherwise.
func TestASequencerIsUrgedByWhoWaits(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	var wake, numbered events.Signal
	rounds := make(chan int, 10)
	s, err := events.NewSequencer(events.SequencerDeps{
		Pool: d.Pool(pg.RoleSequencer), Wake: &wake, Numbered: &numbered, Logger: testkit.Logger(t),
		Observe: func(r events.SequencerResult, _ error) { rounds <- r.Numbered },
	}, events.SequencerConfig{Linger: time.Hour, Poll: time.Hour})
	must(t, err)
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	start(t, s.Run)
	select {
	case <-rounds: // the first, from which the linger counts
	case <-ctx.Done():
		t.Fatal("the first event is not numbered")
	}
	token := appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2))
	wake.Notify()
	if len(rounds) > 0 {
		t.Error("an event for which nobody waits is numbered within the linger")
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered, Wake: &wake},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel", Kinds: []string{"e"}})
	start(t, func(ctx context.Context) error {
		return c.Run(ctx, func(context.Context, pgx.Tx, events.Record) error { return nil })
	})
	reached(t, c, token) // for a caller that waits the linger ends
}

// TestAConsumerGathers checks that a consumer that gathers for an hour applies the first event at once, and a later one
// at once if WaitFor waits for it, and not otherwise.
func TestAConsumerGathers(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{Poll: time.Hour}).Run)
	applied := make(chan int64, 10)
	c := newConsumer(t, events.ConsumerDeps{
		Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered, Wake: &wake,
		Committed: func(records []events.Record) {
			for _, r := range records {
				applied <- r.AggregateVersion
			}
		},
	}, events.ConsumerConfig{
		Name: "probe", Schema: "readmodel", Kinds: []string{"e"}, Gather: time.Hour, Poll: time.Hour,
	})
	token := appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	start(t, func(ctx context.Context) error {
		return c.Run(ctx, func(context.Context, pgx.Tx, events.Record) error { return nil })
	})
	reached(t, c, token)
	other := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered, Wake: &wake},
		events.ConsumerConfig{Name: "other", Schema: "readmodel", Kinds: []string{"e"}})
	start(t, func(ctx context.Context) error {
		return other.Run(ctx, func(context.Context, pgx.Tx, events.Record) error { return nil })
	})
	token = appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2))
	wake.Notify()
	reached(t, other, token)
	if got := <-applied; got != 1 || len(applied) > 0 {
		t.Errorf("version %d was applied, and %d more within the pause", got, len(applied))
	}
	reached(t, c, token) // for a caller that waits the pause ends
	select {
	case got := <-applied:
		if got != 2 {
			t.Errorf("version %d was applied", got)
		}
	case <-ctx.Done():
		t.Fatal("the event was not applied")
	}
}
