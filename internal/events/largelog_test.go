package events_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestALargeLogIsReadByItsIndex: in a log of 40,000 events neither the measurement of a consumer's lag nor a cut scans
// the log. Scenario: a lag is measured every few seconds, and a cut takes a thousand batches of events: one scan of the
// log for each is more than all else that Postgres does.
func TestALargeLogIsReadByItsIndex(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	const cutBatch = `SELECT x.cut, x.next IS NOT NULL
		FROM events.cut_events('1 day', '00000000-0000-0000-0000-000000000000', 1000) x`
	var cut int64
	for more := true; more; { // makes the partitions of the day, which reads the default one
		must(t, db.Pool(pg.RoleReadmodel).QueryRow(ctx, cutBatch).Scan(&cut, &more))
	}
	for _, sql := range []string{
		`ALTER TABLE events.event DISABLE TRIGGER USER, NO FORCE ROW LEVEL SECURITY`,
		`ALTER TABLE events.numbered DISABLE TRIGGER USER, NO FORCE ROW LEVEL SECURITY`,
		`INSERT INTO events.event (id, source, kind, aggregate_type, aggregate_id, aggregate_version, payload, created_at)
		SELECT gen_random_uuid(), 'lifecycle', 'run.changed', 'run', n::text, 1, '{}', mesh.clock() - interval '1 year'
		FROM generate_series(1, 40000) n`,
		`INSERT INTO events.numbered (seqs, oldest, xid, first_pos, last_pos, before, highest, open)
		SELECT int8multirange(int8range(min(seq), max(seq), '[]')), pg_current_xact_id(), pg_current_xact_id(), 1 + 100 * g,
			100 + 100 * g, min(seq) - 1, max(seq), int8multirange(int8range(max(seq) + 1, NULL))
		FROM (SELECT seq, (row_number() OVER (ORDER BY seq) - 1) / 100 AS g FROM events.event) x GROUP BY g`,
		`ALTER TABLE events.event ENABLE TRIGGER USER, FORCE ROW LEVEL SECURITY`,
		`ALTER TABLE events.numbered ENABLE TRIGGER USER, FORCE ROW LEVEL SECURITY`,
		`VACUUM ANALYZE`,
	} {
		if _, err := db.OwnerPool().Exec(ctx, sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	_, err := db.Pool(pg.RoleReadmodel).Exec(ctx,
		`INSERT INTO readmodel.event_cursor (name, pos) SELECT 'c', max(last_pos) FROM events.numbered`)
	must(t, err)
	for what, call := range map[string]func(pgx.Tx) error{
		"the lag": func(tx pgx.Tx) error {
			n, err := events.Unnumbered(ctx, tx, pg.RoleReadmodel, "c")
			if err == nil && n != 0 {
				t.Errorf("%d events are not numbered", n)
			}
			return err
		},
		"a cut": func(tx pgx.Tx) error {
			var err error
			cut = 0
			for more := true; err == nil && more && cut == 0; { // a partition without events is dropped first
				err = tx.QueryRow(ctx, cutBatch).Scan(&cut, &more)
			}
			if err == nil && cut < 1000 {
				t.Errorf("%d events were cut", cut)
			}
			return err
		},
	} {
		err := pg.InTx(ctx, db.Pool(pg.RoleReadmodel), func(_ context.Context, tx pgx.Tx) error {
			if err := call(tx); err != nil {
				return err
			}
			var scanned int64
			err := tx.QueryRow(ctx, `SELECT coalesce(sum(seq_tup_read), 0)::bigint FROM pg_stat_xact_user_tables
				WHERE schemaname = 'events' AND relname LIKE 'event%'`).Scan(&scanned)
			if err == nil && scanned > 1000 {
				t.Errorf("%s scanned %d rows of the log", what, scanned)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
