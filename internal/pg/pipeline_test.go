package pg_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestQueuedStatements checks that a queued statement runs in its place, and that its failure fails the call that it
// was sent with.
func TestQueuedStatements(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	pool := testkit.DB(t).OwnerPool()
	if _, err := pool.Exec(
		ctx, "CREATE TABLE mesh.queued (at bigint GENERATED ALWAYS AS IDENTITY, word text UNIQUE)",
	); err != nil {
		t.Fatal(err)
	}
	const add = "INSERT INTO mesh.queued (word) VALUES ($1)"
	words := func() []string {
		rows, err := pool.Query(ctx, "SELECT word FROM mesh.queued ORDER BY at")
		if err != nil {
			t.Fatal(err)
		}
		list, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	broken := errors.New("broken off")
	for _, tc := range []struct {
		name string
		do   func(tx pgx.Tx) error
		want []string // rows that are there afterwards
		code string   // of the refusal
		err  error
	}{
		{name: "nothing", do: func(pgx.Tx) error { return nil }},
		{
			name: "queued alone goes with the commit", do: func(tx pgx.Tx) error { return queue(ctx, tx, add, "a") },
			want: []string{"a"},
		},
		{name: "in the order of the calls", want: []string{"a", "b", "c", "d"}, do: func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, add, "a")
			return errors.Join(err, queue(ctx, tx, add, "b"), queue(ctx, tx, add, "c"), exec(ctx, tx, add, "d"))
		}},
		{name: "a query sees what was queued", want: []string{"a"}, do: func(tx pgx.Tx) error {
			if err := queue(ctx, tx, add, "a"); err != nil {
				return err
			}
			var n int
			if err := tx.QueryRow(ctx, "SELECT count(*) FROM mesh.queued").Scan(&n); err != nil || n != 1 {
				return errors.Join(err, errors.New("not seen"))
			}
			return nil
		}},
		{name: "rows left unread do not block the connection", want: []string{"a"}, do: func(tx pgx.Tx) error {
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 10000)")
			if err != nil {
				return err
			}
			rows.Next()
			rows.Close()
			return errors.Join(rows.Err(), exec(ctx, tx, add, "a"))
		}},
		{name: "its refusal refuses the next statement", code: "23505", do: func(tx pgx.Tx) error {
			err := errors.Join(exec(ctx, tx, add, "a"), queue(ctx, tx, add, "a"))
			if err != nil {
				return errors.Join(broken, err)
			}
			return exec(ctx, tx, add, "b")
		}},
		{name: "its refusal refuses the commit", code: "23505", do: func(tx pgx.Tx) error {
			return errors.Join(exec(ctx, tx, add, "a"), queue(ctx, tx, add, "a"))
		}},
		{
			name: "a first statement that is refused", code: "42P01",
			do: func(tx pgx.Tx) error { return exec(ctx, tx, "DELETE FROM mesh.nowhere") },
		},
		{name: "a first query that is refused", code: "42P01", do: func(tx pgx.Tx) error {
			var n int
			return tx.QueryRow(ctx, "SELECT count(*) FROM mesh.nowhere").Scan(&n)
		}},
		{
			name: "a first statement that cannot be prepared ends it for those that follow", err: pgx.ErrTxClosed,
			do: func(tx pgx.Tx) error {
				if exec(ctx, tx, "INSERT INTO mesh.nowhere (word) VALUES ($1)", "a") == nil {
					return errors.New("not refused")
				}
				return exec(ctx, tx, add, "b")
			},
		},
		{
			name: "a queued statement that cannot be sent is no unknown commit", err: pgx.ErrTxCommitRollback,
			do: func(tx pgx.Tx) error {
				return errors.Join(exec(ctx, tx, add, "a"), queue(ctx, tx, add, struct{}{}))
			},
		},
		{
			name: "a failure drops what is queued", err: broken,
			do: func(tx pgx.Tx) error { return errors.Join(queue(ctx, tx, add, "a"), broken) },
		},
		{
			name: "a savepoint that is undone takes what was queued in it along", want: []string{"a", "d"},
			do: func(tx pgx.Tx) error {
				err := queue(ctx, tx, add, "a")
				undone := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
					return errors.Join(exec(ctx, tx, add, "b"), queue(ctx, tx, add, "c"), broken)
				})
				if !errors.Is(undone, broken) {
					return errors.New("the savepoint did not tell")
				}
				return errors.Join(err, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return queue(ctx, tx, add, "d") }))
			},
		},
		{name: "a refusal in a savepoint is survived", want: []string{"a", "b"}, do: func(tx pgx.Tx) error {
			err := exec(ctx, tx, add, "a")
			if pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return exec(ctx, tx, add, "a") }) == nil {
				return errors.New("not refused")
			}
			return errors.Join(err, exec(ctx, tx, add, "b"))
		}},
		{name: "several statements in one", want: []string{"a", "b", "c"}, do: func(tx pgx.Tx) error {
			return errors.Join(queue(ctx, tx, add, "a"),
				exec(ctx, tx, "INSERT INTO mesh.queued (word) VALUES ('b'); INSERT INTO mesh.queued (word) VALUES ('c')"))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if _, err := pool.Exec(ctx, "TRUNCATE mesh.queued"); err != nil {
				t.Fatal(err)
			}
			err := pg.InTx(ctx, pool, func(_ context.Context, tx pgx.Tx) error { return tc.do(tx) })
			switch {
			case tc.code != "":
				var refusal *pgconn.PgError
				if !errors.As(err, &refusal) || refusal.Code != tc.code || errors.Is(err, pg.ErrCommitUnknown) ||
					errors.Is(err, broken) {
					t.Errorf("answered %v", err)
				}
			case !errors.Is(err, tc.err):
				t.Errorf("answered %v", err)
			}
			if got := words(); !slices.Equal(got, tc.want) {
				t.Errorf("%q are there, want %q", got, tc.want)
			}
			if n := pool.Stat().AcquiredConns(); n != 0 {
				t.Errorf("%d connections were not given back", n)
			}
		})
	}
}

func exec(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

// queued is any statement over the table that a test makes.
var queued = pg.DefineUnprepared(pg.RoleOwner, "pgtest.queued", "the test makes its table",
	func(sql string) string { return sql })

func queue(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	return pg.Queue(ctx, tx, queued.For(sql), args...)
}
