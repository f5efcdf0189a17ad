package events_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// projection makes a table that counts how often each event took effect, and returns the Apply that writes it.
func projection(t *testing.T, d *testkit.Database) events.Apply {
	t.Helper()
	if _, err := d.OwnerPool().Exec(t.Context(),
		`CREATE TABLE readmodel.probe (n bigserial PRIMARY KEY, event_id uuid UNIQUE,
		kind text, aggregate_id text, version bigint)`); err != nil {
		t.Fatal(err)
	}
	return func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		_, err := tx.Exec(ctx, "INSERT INTO readmodel.probe (event_id, kind, aggregate_id, version) VALUES ($1, $2, $3, $4)",
			r.ID, r.Kind, r.AggregateID, r.AggregateVersion)
		return err
	}
}

func projected(t *testing.T, d *testkit.Database) []string {
	t.Helper()
	rows, err := d.Pool(pg.RoleReadmodel).Query(t.Context(), "SELECT kind || version FROM readmodel.probe ORDER BY n")
	if err != nil {
		t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestConsumerAppliesOnceInOrderAndRemembers(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	apply := projection(t, d)
	seq := newSequencer(t, d, nil, nil, events.SequencerConfig{})
	deps := events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel)}
	cfg := events.ConsumerConfig{Name: "probe", Schema: "readmodel", Kinds: []string{"a", "b"}, Batch: 2}
	var want []string
	for v := range int64(5) {
		appendEvents(t, d.Pool(pg.RoleLifecycle), event("a", "x", v), event("other", "x", v), event("b", "y", v))
		want = append(want, fmt.Sprint("a", v), fmt.Sprint("b", v))
	}
	if err := seq.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second consumer is a restarted process
		if err := newConsumer(t, deps, cfg).Drain(ctx, apply); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, projected(t, d)); diff != "" {
			t.Fatal(diff)
		}
	}
	lag, err := newConsumer(t, deps, cfg).Lag(ctx)
	if err != nil || lag.Events != 0 || lag.Cursor != 15 || lag.Horizon != 15 || lag.Parked != 0 {
		t.Fatalf("lag %+v, %v", lag, err)
	}
}

// Three replicas of one consumer share a cursor; every effect happens once, in order.
func TestReplicasShareTheWork(t *testing.T) {
	testkit.IO(t)
	d := testkit.DB(t)
	apply := projection(t, d)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{}).Run)
	for range 3 {
		c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered},
			events.ConsumerConfig{Name: "probe", Schema: "readmodel", Batch: 3, Poll: 20 * time.Millisecond})
		start(t, func(ctx context.Context) error { return c.Run(ctx, apply) })
	}
	const n = 200
	var want []string
	for v := range int64(n) {
		appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", v))
		wake.Notify()
		want = append(want, fmt.Sprint("e", v))
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := len(projected(t, d)); got < n {
			return fmt.Errorf("%d of %d", got, n)
		}
		return nil
	})
	if diff := cmp.Diff(want, projected(t, d)); diff != "" {
		t.Fatal(diff)
	}
}

func TestPoisonIsParkedAndReplayed(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	seq := newSequencer(t, d, nil, nil, events.SequencerConfig{})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("good", "x", 1), event("refused", "x", 2), event("sql", "x", 3),
		event("panics", "x", 4),
		event("good", "x", 5))
	if err := seq.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	tries := map[string]int{}
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		tries[r.Kind]++
		// Each event writes first: the writes of a poison event before its failure must not stay.
		if err := insert(ctx, tx, r); err != nil {
			return err
		}
		switch r.Kind {
		case "refused":
			return errors.New("cannot make sense of \x00 this")
		case "sql":
			_, err := tx.Exec(ctx, "SELECT 1/0")
			return err
		case "panics":
			_ = tries[r.Kind[:len(r.Kind)*100]] // out of range
		}
		return nil
	}
	var applied []string
	var committed []string
	c := newConsumer(t, events.ConsumerDeps{
		Pool:      d.Pool(pg.RoleReadmodel),
		Parked:    func(r events.Record, err error) { applied = append(applied, r.Kind) },
		Committed: func(rs []events.Record) { committed = append(committed, kinds(rs)...) },
	}, events.ConsumerConfig{Name: "probe", Schema: "readmodel"})
	if err := c.Drain(ctx, apply); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"good1", "good5"}, projected(t, d)); diff != "" {
		t.Fatal(diff)
	}
	if diff := cmp.Diff([]string{"refused", "sql", "panics"}, applied); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"good", "good"}, committed); diff != "" {
		t.Error(diff)
	}
	if tries["sql"] < 3 || tries["panics"] != 3 {
		t.Errorf("tries %v", tries)
	}
	parked, err := c.Parked(ctx)
	if err != nil || len(parked) != 3 || parked[0].Kind != "refused" || parked[0].Pos != 2 || parked[0].Attempts != 3 {
		t.Fatalf("parked %+v, %v", parked, err)
	}

	// Still broken: the event stays parked, with one attempt more. Repaired: it takes effect once and leaves the list.
	if err := c.Replay(ctx, 2, apply); err == nil {
		t.Fatal("a broken replay passed")
	}
	if err := c.Replay(ctx, 2, insert); err != nil {
		t.Fatal(err)
	}
	if err := c.Replay(ctx, 2, insert); !errors.Is(err, events.ErrNotParked) {
		t.Fatalf("replayed twice: %v", err)
	}
	if parked, err = c.Parked(ctx); err != nil || len(parked) != 2 {
		t.Fatalf("parked %+v, %v", parked, err)
	}
	if diff := cmp.Diff([]string{"good1", "good5", "refused2"}, projected(t, d)); diff != "" {
		t.Fatal(diff)
	}
}

// Scenario: a person asks for all parked events to be applied again while the consumer runs. It applies with its next
// batch those that it can, once; the others stay parked with the new error, and are not tried by later batches.
func TestAskedReplaysComeWithTheNextBatch(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	numbered := &events.Signal{}
	seq := newSequencer(t, d, nil, numbered, events.SequencerConfig{})
	var repaired atomic.Bool
	var tries atomic.Int64
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		if r.Kind == "broken" || r.Kind == "refused" && !repaired.Load() {
			tries.Add(1)
			return errors.New("it is of no use")
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: numbered},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel", Gather: time.Millisecond})
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run, apply) }()
	defer func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	write := func(list ...events.Event) {
		t.Helper()
		appendEvents(t, d.Pool(pg.RoleLifecycle), list...)
		if err := seq.Drain(ctx); err != nil {
			t.Fatal(err)
		}
	}
	become := func(shown []string, attempts ...int) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			parked, err := c.Parked(ctx)
			if err != nil {
				return err
			}
			var got []int
			for _, p := range parked {
				got = append(got, p.Attempts)
			}
			if !slices.Equal(got, attempts) || !slices.Equal(projected(t, d), shown) {
				return fmt.Errorf("attempts %v, applied %v", got, projected(t, d))
			}
			return nil
		})
	}
	write(event("good", "x", 1), event("refused", "x", 2), event("broken", "x", 3))
	become([]string{"good1"}, 3, 3)
	repaired.Store(true)
	before := tries.Load()
	if _, err := d.OwnerPool().Exec(ctx, `UPDATE readmodel.parked_event SET asked_at = mesh.clock()`); err != nil {
		t.Fatal(err)
	}
	write(event("good", "x", 4))
	become([]string{"good1", "good4", "refused2"}, 4)
	write(event("good", "x", 5))
	become([]string{"good1", "good4", "refused2", "good5"}, 4)
	if n := tries.Load() - before; n != 1 {
		t.Errorf("what cannot be applied was tried %d times", n)
	}
}

// Scenario: a person asks for a replay by a consumer whose result depends on the order. The event is not applied, and
// the error says why.
func TestAConsumerInOrderRefusesReplays(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	numbered := &events.Signal{}
	seq := newSequencer(t, d, nil, numbered, events.SequencerConfig{})
	refuses := true
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		if refuses && r.Kind == "refused" {
			return errors.New("it is of no use")
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleRecovery), Numbered: numbered},
		events.ConsumerConfig{Name: "probe", Schema: "recovery", InOrder: true})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("refused", "x", 1))
	if err := seq.Drain(ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.Drain(ctx, apply); err != nil {
		t.Fatal(err)
	}
	refuses = false
	if _, err := d.OwnerPool().Exec(ctx, `UPDATE recovery.parked_event SET asked_at = mesh.clock()`); err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run, apply) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		parked, err := c.Parked(ctx)
		if err == nil && (len(parked) != 1 || parked[0].Attempts != 4 ||
			!strings.Contains(parked[0].Error, "in their order")) {
			err = fmt.Errorf("parked are %+v", parked)
		}
		return err
	})
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if shown := projected(t, d); len(shown) > 0 {
		t.Errorf("applied are %v", shown)
	}
}

func kinds(rs []events.Record) []string {
	var list []string
	for _, r := range rs {
		list = append(list, r.Kind)
	}
	return list
}

// Conditions that pass by themselves park nothing: a connection that is cut in mid-batch, and an error that Apply marks
// with Later.
func TestOutagesParkNothing(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{}).Run)
	var calls atomic.Int64
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		switch calls.Add(1) {
		case 2:
			_, err := tx.Exec(ctx, "SELECT pg_terminate_backend(pg_backend_pid())")
			return err
		case 5:
			return events.Later(errors.New("the peer is not there yet"))
		case 8:
			_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")
			return err
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel"})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1), event("e", "x", 2), event("e", "x", 3))
	wake.Notify()
	start(t, func(ctx context.Context) error { return c.Run(ctx, apply) })
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := projected(t, d); !cmp.Equal(got, []string{"e1", "e2", "e3"}) {
			return fmt.Errorf("projected %v", got)
		}
		return nil
	})
	if parked, err := c.Parked(ctx); err != nil || len(parked) != 0 {
		t.Fatalf("parked %+v, %v", parked, err)
	}
	if n := calls.Load(); n < 8 {
		t.Fatalf("only %d calls: not every outage was met", n)
	}
}

// If a statement exceeds its timeout, the database is busy or another session holds a lock: the event waits, however
// often that happens.
func TestStatementTimeoutsParkNothing(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{}).Run)
	var cut atomic.Int64
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		if r.AggregateVersion == 2 && cut.Load() < 8 {
			cut.Add(1)
			if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = '5ms'"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel"})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1), event("e", "x", 2), event("e", "x", 3))
	wake.Notify()
	start(t, func(ctx context.Context) error { return c.Run(ctx, apply) })
	testkit.Eventually(t, testkit.Patience, func() error {
		if parked, err := c.Parked(ctx); err != nil || len(parked) != 0 {
			t.Fatalf("parked %+v, %v", parked, err)
		}
		if got := projected(t, d); !cmp.Equal(got, []string{"e1", "e2", "e3"}) {
			return fmt.Errorf("projected %v after %d timeouts", got, cut.Load())
		}
		return nil
	})
}

// An event that times out for longer than any other cause delays the database is parked, so that it does not stop the
// consumer.
func TestAnEventThatAlwaysTimesOutIsParked(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{}).Run)
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		if r.AggregateVersion == 2 {
			if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = '5ms'"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel", Patience: 100 * time.Millisecond})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1), event("e", "x", 2), event("e", "x", 3))
	wake.Notify()
	start(t, func(ctx context.Context) error { return c.Run(ctx, apply) })
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := projected(t, d); !cmp.Equal(got, []string{"e1", "e3"}) {
			return fmt.Errorf("projected %v", got)
		}
		return nil
	})
	if parked, err := c.Parked(ctx); err != nil || len(parked) != 1 || parked[0].Pos != 2 {
		t.Fatalf("parked %+v, %v", parked, err)
	}
}

// Scenario: Apply marks with Later that a timeout is not the fault of the event, as the audit log does, which has no
// gaps. The event is not parked, however long the timeouts go on, and is applied when they are over.
func TestATimeoutThatIsMarkedIsNeverParked(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	var wake, numbered events.Signal
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{}).Run)
	const slow = 10
	var tries atomic.Int32
	apply := func(ctx context.Context, tx pgx.Tx, r events.Record) error {
		if r.AggregateVersion == 2 && tries.Add(1) <= slow {
			if _, err := tx.Exec(ctx, "SET LOCAL statement_timeout = '5ms'"); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			return events.Later(err)
		}
		return insert(ctx, tx, r)
	}
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel", Patience: time.Nanosecond})
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1), event("e", "x", 2), event("e", "x", 3))
	wake.Notify()
	start(t, func(ctx context.Context) error { return c.Run(ctx, apply) })
	testkit.Eventually(t, testkit.Patience, func() error {
		if got := projected(t, d); len(got) < 2 || got[len(got)-1] != "e3" {
			return fmt.Errorf("projected %v", got)
		}
		return nil
	})
	if got := projected(t, d); !cmp.Equal(got, []string{"e1", "e2", "e3"}) {
		t.Errorf("projected %v", got)
	}
	if parked, err := c.Parked(ctx); err != nil || len(parked) != 0 {
		t.Errorf("parked %+v, %v", parked, err)
	}
}

// reached waits until a projection has reached a position, as clients do: it repeats a wait that ends before.
func reached(t *testing.T, c *events.Consumer, token string) {
	t.Helper()
	testkit.Eventually(t, testkit.Patience, func() error {
		err := c.WaitFor(testkit.Context(t), token)
		if err != nil && !errors.Is(err, events.ErrBehind) {
			t.Fatal(err)
		}
		return err
	})
}

func TestWaitFor(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	insert := projection(t, d)
	var wake, numbered events.Signal
	// The loops find nothing by polling: a lost wake would make a wait that does not end.
	start(t, newSequencer(t, d, &wake, &numbered, events.SequencerConfig{Poll: time.Hour}).Run)
	cfg := events.ConsumerConfig{Name: "probe", Schema: "readmodel", Kinds: []string{"e"}, Poll: time.Hour}
	deps := events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel), Numbered: &numbered, Wake: &wake}
	c := newConsumer(t, deps, cfg)

	token := appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := c.WaitFor(short, token); !errors.Is(err, events.ErrBehind) {
		t.Fatalf("with no consumer running: %v", err)
	}
	start(t, func(ctx context.Context) error { return c.Run(ctx, insert) })
	for v := int64(2); v < 30; v++ {
		// Also an event that the consumer does not apply, and one that another replica's consumer waits for.
		token = appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", v), event("other", "x", v))
		waiter := c
		if v%3 == 0 {
			waiter = newConsumer(t, deps, cfg)
		}
		reached(t, waiter, token)
		if got := len(projected(t, d)); int64(got) != v {
			t.Fatalf("%d projected after waiting for %d", got, v)
		}
	}
	for _, bad := range []string{ids.New(), "nonsense"} {
		if err := c.WaitFor(ctx, bad); !errors.Is(err, events.ErrUnknownPosition) {
			t.Errorf("token %q: %v", bad, err)
		}
	}
	if err := c.WaitFor(ctx, ""); err != nil {
		t.Error(err)
	}
}
