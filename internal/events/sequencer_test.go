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
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// open begins a transaction that has appended an event and is not committed yet.
func open(t *testing.T, pool *pgxpool.Pool, e events.Event) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if _, err := events.Append(t.Context(), tx, e); err != nil {
		t.Fatal(err)
	}
	return tx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newest returns the newest row of numbers: the seqs that it numbers, their positions, and the seqs that it leaves
// open.
func newest(t *testing.T, d *testkit.Database) string {
	t.Helper()
	var row string
	must(t, d.Pool(pg.RoleReadmodel).QueryRow(t.Context(),
		"SELECT seqs || ' at ' || first_pos || '-' || last_pos || ', open ' || open FROM events.numbered ORDER BY "+
			"last_pos DESC LIMIT 1").Scan(&row))
	return row
}

func readAll(t *testing.T, d *testkit.Database) []string {
	t.Helper()
	records, _, err := events.Read(t.Context(), d.Pool(pg.RoleReadmodel), 0, nil, 1000)
	must(t, err)
	list := make([]string, 0, len(records))
	for _, r := range records {
		list = append(list, fmt.Sprintf("%d %s", r.Pos, r.Kind))
	}
	return list
}

// A seq below numbered ones stays open as long as a transaction may still commit it, whichever sequencer does the next
// round, and no longer. Two sequencers take turns; neither keeps state in memory.
func TestAHoleStaysOpenUntilNoTransactionCanFillIt(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	writer := d.Pool(pg.RoleLifecycle)
	turns := 0
	both := []*events.Sequencer{
		newSequencer(t, d, nil, nil, events.SequencerConfig{}),
		newSequencer(t, d, nil, nil, events.SequencerConfig{}),
	}
	next := func(want string) {
		t.Helper()
		turns++
		must(t, both[turns%2].Drain(ctx))
		if got := newest(t, d); got != want {
			t.Fatalf("after round %d: %s; want %s", turns, got, want)
		}
	}
	late, aborted := open(t, writer, event("late", "x", 1)), open(t, writer, event("aborted", "y", 1))
	appendEvents(t, writer, event("a", "z", 1))
	next("{[3,4)} at 1-1, open {[1,3),[4,)}")
	must(t, aborted.Rollback(ctx))
	for i := range int64(3) { // the open transaction is older than all of these rounds
		appendEvents(t, writer, event("b", "z", 2+i))
		next(fmt.Sprintf("{[%d,%d)} at %d-%d, open {[1,3),[%d,)}", 4+i, 5+i, 2+i, 2+i, 5+i))
	}
	must(t, late.Commit(ctx))
	next("{[1,2)} at 5-5, open {[2,3),[7,)}")
	// Transactions of other databases of the server may be older than the round, and keep it open until they end.
	for pos := int64(6); ; pos++ {
		appendEvents(t, writer, event("c", "z", pos-1))
		turns++
		must(t, both[turns%2].Drain(ctx))
		got := newest(t, d)
		if got == fmt.Sprintf("{[%d,%d)} at %d-%d, open {[%d,)}", pos+1, pos+2, pos, pos, pos+2) {
			break
		}
		if want := fmt.Sprintf("{[%d,%d)} at %d-%d, open {[2,3),[%d,)}", pos+1, pos+2, pos, pos, pos+2); got != want ||
			ctx.Err() != nil {
			t.Fatalf("after round %d: %s; want %s or the hole closed", turns, got, want)
		}
	}
	if diff := cmp.Diff([]string{"1 a", "2 b", "3 b", "4 b", "5 late", "6 c"}, readAll(t, d)[:6]); diff != "" {
		t.Fatal(diff)
	}
}

// A round that ends early leaves open the seqs that it did not reach.
func TestACutShortRoundLosesNothing(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	writer := d.Pool(pg.RoleLifecycle)
	seq := newSequencer(t, d, nil, nil, events.SequencerConfig{Batch: 2})
	one, two := open(t, writer, event("one", "x", 1)), open(t, writer, event("two", "y", 1))
	for i := range int64(7) {
		appendEvents(t, writer, event("e", "z", i))
	}
	must(t, seq.Drain(ctx))
	must(t, one.Commit(ctx))
	appendEvents(t, writer, event("f", "z", 8), event("f", "z", 9))
	must(t, two.Commit(ctx))
	must(t, seq.Drain(ctx))
	want := []string{"1 e", "2 e", "3 e", "4 e", "5 e", "6 e", "7 e", "8 one", "9 two", "10 f", "11 f"}
	if diff := cmp.Diff(want, readAll(t, d)); diff != "" {
		t.Fatal(diff)
	}
}

// The conclusions from transaction ids are right only if a transaction has its id before it draws a seq, even if it has
// written nothing before. The test locks the sequence and observes the transaction between the two steps.
func TestATransactionHasItsIDBeforeItDrawsASeq(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	owner, err := d.OwnerPool().Begin(ctx)
	must(t, err)
	defer func() { _ = owner.Rollback(context.Background()) }()
	_, err = owner.Exec(ctx, "ALTER SEQUENCE events.event_seq_seq CACHE 1")
	must(t, err)
	done := make(chan error, 1)
	go func() {
		done <- pg.InTx(ctx, d.Pool(pg.RoleLifecycle), func(ctx context.Context, tx pgx.Tx) error {
			_, err := events.Append(ctx, tx, event("first", "x", 1), event("second", "x", 2))
			return err
		})
	}()
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer func() { _ = admin.Close(context.Background()) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		// Two queries: in one, the id might be read before it is given, and the lock after it is waited for. Databases that
		// are copies of one template have the same oids, so the lock must be one of this database.
		var pid int32
		err := admin.QueryRow(ctx, `SELECT l.pid FROM pg_locks l
			WHERE l.relation = 'events.event_seq_seq'::regclass AND NOT l.granted
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&pid)
		if errors.Is(err, pgx.ErrNoRows) {
			return errors.New("no session waits for the sequence")
		}
		must(t, err)
		var hasID bool
		must(t, admin.QueryRow(ctx, `SELECT backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = $1`,
			pid).Scan(&hasID))
		if !hasID {
			t.Fatal("a transaction without an id draws a seq")
		}
		return nil
	})
	must(t, owner.Rollback(ctx))
	must(t, <-done)
}

// waiters counts the sessions that wait for an advisory lock of this database, and those that hold one.
func waiters(t *testing.T, conn *pgx.Conn) (waiting, holders int) {
	t.Helper()
	must(t, conn.QueryRow(t.Context(),
		`SELECT count(*) FILTER (WHERE NOT granted), count(*) FILTER (WHERE granted) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database
			WHERE datname = current_database())`).Scan(&waiting, &holders))
	return waiting, holders
}

// While a sequencer numbers, one other waits for it and the rest return; the one that waited numbers the events that
// were committed meanwhile, without a poll. A session that inserts numbers without asking for a turn waits as well.
func TestOneSequencerWaitsForAllOthers(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer func() { _ = admin.Close(context.Background()) }()
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	// The holder has numbered the first event and does not commit.
	holder, err := d.Pool(pg.RoleSequencer).Begin(ctx)
	must(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = holder.Exec(ctx, "INSERT INTO events.numbered (seqs, oldest) VALUES ('{[1,2)}', '1')")
	must(t, err)

	var wake, numbered events.Signal
	cfg := events.SequencerConfig{Poll: time.Hour}
	cut, cancel := context.WithCancel(ctx)
	first := make(chan error, 1)
	victim := newSequencer(t, d, &wake, &numbered, cfg)
	go func() { first <- victim.Run(cut) }()
	oneWaits := func() error {
		if waiting, _ := waiters(t, admin); waiting != 1 {
			return fmt.Errorf("%d wait", waiting)
		}
		return nil
	}
	testkit.Eventually(t, testkit.Patience, oneWaits)
	// The waiting sequencer is stopped: it must not keep its place in the queue.
	cancel()
	must(t, <-first)
	testkit.Eventually(t, testkit.Patience, func() error {
		if waiting, holders := waiters(t, admin); waiting != 0 || holders != 1 {
			return fmt.Errorf("%d wait, %d locks are held", waiting, holders)
		}
		return nil
	})
	for range 4 {
		start(t, newSequencer(t, d, &wake, &numbered, cfg).Run)
	}
	testkit.Eventually(t, testkit.Patience, oneWaits)
	for i := range int64(3) {
		appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 2+i))
		wake.Notify()
	}
	must(t, oneWaits())
	seen := numbered.C()
	must(t, holder.Commit(ctx))
	select {
	case <-seen:
	case <-ctx.Done():
		t.Fatal("nobody numbered what was committed while the holder was at work")
	}
	if diff := cmp.Diff([]string{"1 e", "2 e", "3 e", "4 e"}, readAll(t, d)); diff != "" {
		t.Fatal(diff)
	}
}

// failOnce fails the first statement of a name, as a connection does that breaks.
type failOnce struct {
	name   string
	failed atomic.Bool
}

func (f *failOnce) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(data.SQL, f.name) || f.failed.Swap(true) {
		return ctx
	}
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}

func (f *failOnce) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Another process hears of new numbers though the first notification of them failed.
func TestANotificationThatFailedIsSentAgain(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	pool, err := pgxpool.ParseConfig(d.URL(pg.RoleSequencer))
	must(t, err)
	breaks := &failOnce{name: "events.notify_all"}
	pool.ConnConfig.Tracer = breaks
	broken, err := pgxpool.NewWithConfig(ctx, pool)
	must(t, err)
	t.Cleanup(broken.Close)
	var wake events.Signal
	heard := testkit.ListeningSignal(t, d).C() // of the other process
	seq, err := events.NewSequencer(events.SequencerDeps{Pool: broken, Wake: &wake, Logger: testkit.Logger(t)},
		events.SequencerConfig{Poll: time.Hour})
	must(t, err)
	start(t, seq.Run)
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	wake.Notify()
	select {
	case <-heard:
	case <-ctx.Done():
		t.Fatal("the other process heard nothing")
	}
	if !breaks.failed.Load() {
		t.Error("no notification failed")
	}
}

// A sequencer that has left its events to another, which waits for its turn, does not rely on it for longer than a
// poll: the other may die.
func TestACoveredSequencerReadsAgain(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer func() { _ = admin.Close(context.Background()) }()
	holder, err := d.Pool(pg.RoleSequencer).Begin(ctx)
	must(t, err)
	defer func() { _ = holder.Rollback(context.Background()) }()
	_, err = holder.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", events.SequencerLock)
	must(t, err)
	cut, cancel := context.WithCancel(ctx)
	defer cancel()
	first := make(chan error, 1)
	victim := newSequencer(t, d, nil, nil, events.SequencerConfig{Poll: time.Hour})
	go func() { first <- victim.Run(cut) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		if waiting, _ := waiters(t, admin); waiting != 1 {
			return fmt.Errorf("%d wait", waiting)
		}
		return nil
	})
	var numbered events.Signal
	defer events.Listen(&numbered)() // an unwoken loop sleeps for ten seconds
	seen := numbered.C()
	cfg, err := pgxpool.ParseConfig(d.URL(pg.RoleSequencer))
	must(t, err)
	var rounds atomic.Int64
	cfg.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
		rounds.Add(1)
		return true, nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	covered, err := events.NewSequencer(events.SequencerDeps{Pool: pool, Numbered: &numbered, Logger: testkit.Logger(t)},
		events.SequencerConfig{Poll: 10 * time.Millisecond})
	must(t, err)
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("e", "x", 1))
	start(t, covered.Run)
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := rounds.Load(); n < 20 {
			return fmt.Errorf("%d rounds", n)
		}
		return nil
	})
	const waitsForLock = `SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	var pid int
	must(t, admin.QueryRow(ctx, waitsForLock).Scan(&pid))
	cancel()
	must(t, <-first)
	// Its session would still get the lock, and number the event without a word to this process.
	testkit.Eventually(t, testkit.Patience, func() error {
		var there bool
		err := admin.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, pid).Scan(&there)
		if err == nil && there {
			err = fmt.Errorf("session %d is there", pid)
		}
		return err
	})
	must(t, holder.Rollback(ctx))
	testkit.Eventually(t, testkit.Patience, func() error {
		select {
		case <-seen:
			return nil
		default:
			return errors.New("no sequencer numbered what the one that died was to number")
		}
	})
}

// A backup is restored under a running sequencer: seqs and numbers that it has seen are given again, to other events.
func TestARestoredDatabaseGoesOnFromItsOwnRows(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	seq := newSequencer(t, d, nil, nil, events.SequencerConfig{})
	for i := range int64(20) {
		appendEvents(t, d.Pool(pg.RoleLifecycle), event(fmt.Sprint("old", i), "x", i))
		must(t, seq.Drain(ctx))
	}
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer func() { _ = admin.Close(context.Background()) }()
	for _, sql := range []string{
		"DELETE FROM events.event WHERE seq > 2", "DELETE FROM events.numbered WHERE last_pos > 2",
		"SELECT setval('events.event_seq_seq', 2)",
	} {
		_, err := admin.Exec(ctx, sql)
		must(t, err)
	}
	_, err = testkit.RaiseEra(ctx, d.OwnerPool(), "restored")
	must(t, err)
	var want []string
	for i := range int64(5) {
		appendEvents(t, d.Pool(pg.RoleLifecycle), event(fmt.Sprint("new", i), "x", i))
		must(t, seq.Drain(ctx))
		want = append(want, fmt.Sprintf("%d new%d", 1<<40+i, i))
	}
	if diff := cmp.Diff(append([]string{"1 old0", "2 old1"}, want...), readAll(t, d)); diff != "" {
		t.Fatal(diff)
	}
}

// Many rounds of every size, with holes and late comers, a jump of the era in the middle: every way to read agrees with
// a plain query of all rows.
func TestReadingOverManyRounds(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	writer, reader := d.Pool(pg.RoleLifecycle), d.Pool(pg.RoleReadmodel)
	var held []pgx.Tx
	for round := range 120 {
		if round%10 == 0 {
			held = append(held, open(t, writer, event("late", fmt.Sprint(round), 1)))
		}
		evs := make([]events.Event, 1+round*7%23)
		for i := range evs {
			evs[i] = event([]string{"a", "b", "c"}[i%3], "x", 1)
		}
		if round == 77 {
			evs[0].Kind = "rare"
		}
		appendEvents(t, writer, evs...)
		switch {
		case round%10 == 5:
			must(t, held[0].Commit(ctx))
			held = held[1:]
		case round == 60:
			_, err := testkit.RaiseEra(ctx, d.OwnerPool(), "restored")
			must(t, err)
		}
		must(t, newSequencer(t, d, nil, nil, events.SequencerConfig{Batch: 1 + round%9}).Drain(ctx))
	}
	// The plain query.
	rows, err := reader.Query(ctx,
		`SELECT n.first_pos - 1 + row_number() OVER (PARTITION BY n.last_pos ORDER BY e.seq) AS pos, e.kind, e.id::text
		FROM events.numbered n JOIN events.event e ON n.seqs @> e.seq ORDER BY 1`)
	must(t, err)
	type place struct {
		Pos      int64
		Kind, ID string
	}
	want, err := pgx.CollectRows(rows, pgx.RowToStructByPos[place])
	must(t, err)
	var total int
	must(t, reader.QueryRow(ctx, "SELECT count(*) FROM events.event").Scan(&total))
	if len(want) != total || total < 1000 || want[total-1].Pos < 1<<40 {
		t.Fatalf("%d of %d events are numbered, up to %d", len(want), total, want[len(want)-1].Pos)
	}
	for _, of := range [][]string{nil, {"a"}, {"b", "late"}, {"rare"}, {"none"}} {
		for _, limit := range []int{1, 7, 100, 5000} {
			var got []place
			for after := int64(0); ; {
				records, next, err := events.Read(ctx, reader, after, of, limit)
				must(t, err)
				for _, r := range records {
					got = append(got, place{r.Pos, r.Kind, r.ID})
				}
				if after = next; len(records) < limit {
					break
				}
			}
			kept := slices.DeleteFunc(slices.Clone(want),
				func(p place) bool { return of != nil && !slices.Contains(of, p.Kind) })
			if diff := cmp.Diff(kept, got, cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("kinds %v, limit %d: %s", of, limit, diff)
			}
		}
	}
	consumer := newConsumer(t, events.ConsumerDeps{Pool: reader},
		events.ConsumerConfig{Name: "probe", Schema: "readmodel"})
	for i := 0; i < total; i += 37 {
		at, err := events.At(ctx, reader, want[i].Pos)
		if err != nil || at.ID != want[i].ID {
			t.Fatalf("at %d: %s, %v; want %s", want[i].Pos, at.ID, err, want[i].ID)
		}
		known, behind, err := events.Between(ctx, reader, want[i].Pos, want[total-1].Pos, 200)
		if err != nil || !known || behind != min(total-1-i, 201) {
			t.Fatalf("between %d and the end: %v, %d, %v; want %d", want[i].Pos, known, behind, err, total-1-i)
		}
		if i+1 < total {
			if _, behind, err := events.Between(ctx, reader, want[i].Pos, want[i+1].Pos, 200); err != nil || behind != 1 {
				t.Fatalf("between neighbours: %d, %v", behind, err)
			}
		}
		_, err = reader.Exec(ctx, `INSERT INTO readmodel.event_cursor (name, pos) VALUES ('probe', $1)
			ON CONFLICT (name) DO UPDATE SET pos = EXCLUDED.pos`, want[i].Pos)
		must(t, err)
		must(t, consumer.WaitFor(ctx, want[i].ID))
		if i+1 < total {
			short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
			if err := consumer.WaitFor(short, want[i+1].ID); err == nil ||
				!strings.Contains(err.Error(), events.ErrBehind.Error()) {
				t.Fatalf("waited for the event after the cursor: %v", err)
			}
			cancel()
		}
		if lag, err := consumer.Lag(ctx); err != nil || lag.Events != int64(total-1-i) || lag.Horizon != want[total-1].Pos ||
			lag.Unnumbered != 0 {
			t.Fatalf("lag %+v, %v; want %d", lag, err, total-1-i)
		}
	}
	for _, pos := range []int64{1<<40 - 1, want[total-1].Pos + 1, -1} {
		if known, _, err := events.Between(ctx, reader, pos, want[total-1].Pos, 10); err != nil || known {
			t.Errorf("position %d is known: %v, %v", pos, known, err)
		}
		if r, err := events.At(ctx, reader, pos); !pg.IsNoRows(err) {
			t.Errorf("at %d: %+v, %v", pos, r, err)
		}
	}
	// Events that are not numbered yet count as well.
	appendEvents(t, writer, event("a", "x", 1), event("a", "x", 2))
	if lag, err := consumer.Lag(ctx); err != nil || lag.Unnumbered != 2 || lag.Oldest <= 0 {
		t.Errorf("lag %+v, %v", lag, err)
	}
}
