package events_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// days is a log over several days, whose consumers have read all events.
type days struct {
	t *testing.T
	*testkit.Database
	seq   *events.Sequencer
	today time.Time
}

// newDays returns a log on the day on which its first partition was made: the tests may have begun on the day before.
func newDays(t *testing.T) days {
	t.Helper()
	d := days{t: t, Database: testkit.DB(t)}
	ctx := testkit.Context(t)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer admin.Close(context.WithoutCancel(ctx))
	must(t, admin.QueryRow(ctx, `SELECT min(to_date(substr(c.relname, 7), 'YYYYMMDD')) FROM pg_inherits i
		JOIN pg_class c ON c.oid = i.inhrelid
		WHERE i.inhparent = 'events.event'::regclass AND c.relname ~ '[0-9]'`).Scan(&d.today))
	d.seq = newSequencer(t, d.Database, nil, nil, events.SequencerConfig{})
	d.at(0, 12*time.Hour)
	d.cut()
	return d
}

// at sets the clock of the database to a time of the n-th day from today on.
func (d days) at(n int, of time.Duration) {
	d.t.Helper()
	testkit.SetClockOffset(d.Database, time.Until(d.today.AddDate(0, 0, n).Add(of)))
}

// awaitOpenTransactions waits until every transaction of the server that has begun is over: seqs that one of another
// test's database might have been given stay open until then.
func (d days) awaitOpenTransactions() {
	d.t.Helper()
	ctx := testkit.Context(d.t)
	var begun string
	must(d.t, d.OwnerPool().QueryRow(ctx, `SELECT pg_current_xact_id()::text`).Scan(&begun))
	testkit.Eventually(d.t, 2*testkit.Patience, func() error {
		var over bool
		err := d.OwnerPool().QueryRow(ctx, `SELECT pg_snapshot_xmin(pg_current_snapshot()) > $1::xid8`, begun).Scan(&over)
		if err == nil && !over {
			err = fmt.Errorf("transactions of before %s are open", begun)
		}
		return err
	})
}

// append appends and numbers events, and moves every cursor to the end.
func (d days) append(n int) {
	d.t.Helper()
	for i := range n {
		d.awaitOpenTransactions() // the next round closes the seqs that a round has left open
		appendEvents(d.t, d.Pool(pg.RoleLifecycle), event("probe", "x", int64(i)))
		must(d.t, d.seq.Drain(testkit.Context(d.t)))
	}
	for _, s := range []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel} {
		d.as(s, `INSERT INTO `+s+`.event_cursor (name, pos)
			SELECT 'c', max(last_pos) FROM events.numbered
			ON CONFLICT (name) DO UPDATE SET pos = excluded.pos`)
	}
}

func (d days) as(role, sql string) {
	d.t.Helper()
	_, err := d.Pool(role).Exec(testkit.Context(d.t), sql)
	must(d.t, err)
}

const cutOnce = `SELECT x.cut, x.next IS NOT NULL
	FROM events.cut_events('0', '00000000-0000-0000-0000-000000000000', 500) x`

// cut walks to the end and returns how many events were cut.
func (d days) cut() int64 {
	d.t.Helper()
	var total, n int64
	for more := true; more; total += n {
		must(d.t, d.Pool(pg.RoleReadmodel).QueryRow(testkit.Context(d.t), cutOnce).Scan(&n, &more))
	}
	return total
}

// parts returns the partitions by the number of their day from today on, and how many events each has; the partitions
// for seqs of no day are "first" and "default".
func (d days) parts() string {
	d.t.Helper()
	ctx := testkit.Context(d.t)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(d.t, err)
	defer admin.Close(context.WithoutCancel(ctx))
	rows, err := admin.Query(ctx, `SELECT concat_ws(' ', CASE WHEN c.relname ~ '[0-9]'
		THEN (to_date(substr(c.relname, 7), 'YYYYMMDD') - $1::date)::text
			ELSE substr(c.relname, 7) END, nullif((SELECT count(*) FROM events.event e WHERE e.tableoid = c.oid), 0))
		FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'events.event'::regclass
			ORDER BY c.relname`, d.today)
	must(d.t, err)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(d.t, err)
	return strings.Join(found, ", ")
}

func (d days) wantParts(when, want string) {
	d.t.Helper()
	if got := d.parts(); got != want {
		d.t.Errorf("%s: the partitions are %q, not %q", when, got, want)
	}
}

// read returns the positions that are left in the log.
func (d days) read() []int64 {
	d.t.Helper()
	all, _, err := events.Read(testkit.Context(d.t), d.Pool(pg.RoleReadmodel), 0, nil, 1000)
	must(d.t, err)
	var out []int64
	for _, r := range all {
		out = append(out, r.Pos)
	}
	return out
}

// TestADayOfEventsIsDropped: a day's partition is dropped as a whole once its last event has reached the term, and not
// while a consumer has an event of it unread or parked, a rebuild needs it, or a reader has the log's lock.
func TestADayOfEventsIsDropped(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), newDays(t)
	token := appendEvents(t, d.Pool(pg.RoleLifecycle), event("probe", "x", 0))
	d.append(4)
	all := d.read()
	d.at(1, 12*time.Hour)
	d.cut()
	d.append(5)
	all = append(all, d.read()[5:]...)
	d.wantParts("after two days", "0 5, 1 5, 2, 3, default")
	d.at(14, 11*time.Hour)
	d.cut()
	d.wantParts("an hour before the term", "0 5, 1 5, 2, 3, 14, 15, 16, default")

	d.at(14, 13*time.Hour)
	d.append(1)
	all = append(all, d.read()[10:]...)
	for why, keep := range map[string][2]string{
		"unread": {`UPDATE recovery.event_cursor SET pos = pos - 11`, `UPDATE recovery.event_cursor SET pos = pos + 11`},
		"parked": {`INSERT INTO recovery.parked_event (consumer, pos, event_id, kind, error, attempts)
			SELECT 'c', min(first_pos), gen_random_uuid(), 'k', 'e', 1
				FROM events.numbered`, `DELETE FROM recovery.parked_event`},
		"rebuild": {`INSERT INTO recovery.event_cursor (name, pos)
			VALUES ('rebuild', 0)`, `DELETE FROM recovery.event_cursor WHERE name = 'rebuild'`},
	} {
		d.as(pg.RoleRecovery, keep[0])
		if n := d.cut(); n != 0 || !slices.Equal(d.read(), all) {
			t.Errorf("%s: %d events were cut", why, n)
		}
		d.as(pg.RoleRecovery, keep[1])
	}
	d.wantParts("with what is unread", "0 5, 1 5, 2, 3, 14 1, 15, 16, default")

	// While a reader keeps the lock, numbers are cut, the partition stays, and appends go on.
	reader, err := d.Pool(pg.RoleNodeAPI).Begin(ctx)
	must(t, err)
	_, err = reader.Exec(ctx, `LOCK TABLE events.event IN ACCESS SHARE MODE`)
	must(t, err)
	if n := d.cut(); n != 5 {
		t.Errorf("%d events were cut beside a reader", n)
	}
	d.wantParts("beside a reader", "0 5, 1 5, 2, 3, 14 1, 15, 16, default")
	c := newConsumer(t, events.ConsumerDeps{Pool: d.Pool(pg.RoleReadmodel)},
		events.ConsumerConfig{Name: "c", Schema: "readmodel", Kinds: []string{"probe"}})
	if err := c.WaitFor(ctx, token); err != nil {
		t.Errorf("a wait for an event whose number was cut: %v", err)
	}
	d.append(1)
	if got := d.read(); !slices.Equal(got[:6], all[5:]) || len(got) != 7 {
		t.Errorf("read %v, not %v and one more", got, all[5:])
	}
	must(t, reader.Rollback(ctx))
	if n := d.cut(); n != 0 {
		t.Errorf("%d events were cut twice", n)
	}
	d.wantParts("at the term", "1 5, 2, 3, 14 2, 15, 16, default")
	if got := d.read(); !slices.Equal(got[:6], all[5:]) {
		t.Errorf("read %v, not %v", got, all[5:])
	}
	var limit string
	must(t, d.OwnerPool().QueryRow(ctx,
		`SELECT array_to_string(proconfig, ', ') FROM pg_proc
			WHERE oid = 'events.keep_partitions(bigint)'::regprocedure`).Scan(&limit))
	if !strings.Contains(limit, "lock_timeout=200ms") {
		t.Errorf("what changes partitions waits for locks by %q", limit)
	}
	d.at(15, 13*time.Hour)
	if n := d.cut(); n != 5 {
		t.Errorf("%d events of the second day were cut", n)
	}
	d.append(1)
	d.cut()
	d.wantParts("a day later", "14 2, 15 1, 16, 17, default")
}

// TestEventsOfNoPartitionAreCut: events in the default partition are deleted row by row, after which the partition of
// their day can be made.
func TestEventsOfNoPartitionAreCut(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), newDays(t)
	d.append(1)
	var next int64
	must(t, d.OwnerPool().QueryRow(ctx,
		`SELECT setval('events.event_seq_seq', (floor(extract(epoch
			FROM mesh.clock()) / 86400)::bigint + 4) << 32)`).Scan(&next))
	d.append(3)
	d.at(3, 12*time.Hour)
	d.cut()
	d.wantParts("three days on", "0 1, 1, 2, 3, 5, default 3")
	d.at(19, 12*time.Hour)
	d.cut()
	d.append(4)
	d.cut()
	d.wantParts("after the term", "19 4, 20, 21, default")
	if got := d.read(); len(got) != 4 {
		t.Errorf("read %v", got)
	}
}

// TestPartitionsOfReplicasThatDieOrMeet: a partition that a replica was making when it died leaves nothing behind, and
// a replica that finds another at work leaves the work to it.
func TestPartitionsOfReplicasThatDieOrMeet(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), newDays(t)
	d.append(1)
	d.at(5, 0)
	dying, err := pgx.Connect(ctx, d.URL(pg.RoleReadmodel))
	must(t, err)
	tx, err := dying.Begin(ctx)
	must(t, err)
	var n int64
	var more bool
	must(t, tx.QueryRow(ctx, cutOnce).Scan(&n, &more))
	if !more {
		t.Error("no partition was made")
	}
	must(t, d.Pool(pg.RoleReadmodel).QueryRow(ctx, cutOnce).Scan(&n, &more))
	if n != 0 || more {
		t.Errorf("a second replica did work beside the first: %d, %t", n, more)
	}
	appendEvents(t, d.Pool(pg.RoleLifecycle), event("probe", "x", 1)) // the work under way makes no append wait
	_, err = d.OwnerPool().Exec(ctx, `SELECT 1`)
	must(t, err)
	admin, err := pgx.Connect(ctx, d.AdminURL())
	must(t, err)
	defer admin.Close(context.WithoutCancel(ctx))
	_, err = admin.Exec(ctx, `SELECT pg_terminate_backend($1, 10000)`, dying.PgConn().PID())
	must(t, err)
	if _, err := tx.Exec(ctx, `SELECT 1`); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the replica lives: %v", err)
	}
	d.wantParts("after the death", "0 2, 1, 2, default, first")
	// A table that was made and never attached is used.
	_, err = d.OwnerPool().Exec(ctx,
		`DO $$ BEGIN EXECUTE format('CREATE TABLE events.%I (LIKE events.event INCLUDING DEFAULTS)',
		'event_' || to_char(mesh.clock() AT TIME ZONE 'UTC', 'YYYYMMDD')); END $$`)
	must(t, err)
	d.cut()
	d.append(1)
	d.wantParts("after the next walk", "0 2, 1, 2, 5 1, 6, 7, default, first")
}

// Scenario: the clock of the database was two months ahead for a moment, and the sequence stays in the day that it was
// then. What is due of the days until then is still done once, and a walk ends.
func TestAClockThatWasAhead(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), newDays(t)
	d.append(2)
	d.at(60, 12*time.Hour)
	d.cut()
	d.append(2)
	d.at(20, 12*time.Hour)
	for range 3 {
		var n int64
		more, calls := true, 0
		for ; more; calls++ {
			must(t, d.Pool(pg.RoleReadmodel).QueryRow(ctx, cutOnce).Scan(&n, &more))
			if calls > 20 {
				t.Fatal("a walk does not end")
			}
		}
		d.append(1)
	}
	d.wantParts("after the clock was put right", "20, 21, 22, 60 5, 61, 62, default")
}

// Scenario: a log that has begun days is taken back to one table, and to partitions once more.
func TestALogOfDaysGoesBackAndForth(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), newDays(t)
	d.append(2)
	owner, err := pgx.Connect(ctx, d.URL(pg.RoleOwner))
	must(t, err)
	defer owner.Close(context.WithoutCancel(ctx))
	up, down := oneTable(t)
	for range 2 {
		execEach(t, owner, down)
		d.append(1)
		execEach(t, owner, up)
		d.append(1)
		d.cut()
	}
	if got := d.read(); len(got) != 6 {
		t.Errorf("read %v, not six events", got)
	}
	d.wantParts("on the same day", "1, 2, default, first 6")
	d.at(1, 12*time.Hour)
	d.cut()
	d.append(1)
	d.wantParts("a day later", "1 1, 2, 3, default, first 6")
}
