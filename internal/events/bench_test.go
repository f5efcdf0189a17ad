package events_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// BenchmarkNumbering numbers what one transaction of n events appended, and for comparison, in the same run, measures
// the least possible cost: one committed row in a bare table. It also measures appending. An op is one round; µs/event
// is its wall time, and db-µs/event the processor time that the server's backend took for it.
func BenchmarkNumbering(b *testing.B) {
	testkit.IO(b)
	for _, n := range []int{1, 20, 1000} {
		b.Run(fmt.Sprintf("raw/%d", n), func(b *testing.B) {
			d := testkit.DB(b)
			if _, err := d.OwnerPool().Exec(b.Context(), "CREATE TABLE readmodel.raw (n bigint, seqs text)"); err != nil {
				b.Fatal(err)
			}
			conn := d.Pool(pg.RoleReadmodel)
			measure(b, conn, n, nil, func(ctx context.Context) error {
				_, err := conn.Exec(ctx, "INSERT INTO readmodel.raw (n, seqs) VALUES ($1, $2)", n, "{[1,20]}")
				return err
			})
		})
		b.Run(fmt.Sprintf("sequencer/%d", n), func(b *testing.B) {
			d := testkit.DB(b)
			seq, err := events.NewSequencer(events.SequencerDeps{Pool: d.Pool(pg.RoleSequencer), Logger: testkit.Logger(b)},
				events.SequencerConfig{})
			if err != nil {
				b.Fatal(err)
			}
			measure(b, d.Pool(pg.RoleSequencer), n, appender(d, n), seq.Drain)
		})
		b.Run(fmt.Sprintf("append/%d", n), func(b *testing.B) {
			d := testkit.DB(b)
			measure(b, d.Pool(pg.RoleLifecycle), n, nil, appender(d, n))
		})
	}
}

// appender returns a function that appends n events in one transaction.
func appender(d *testkit.Database, n int) func(ctx context.Context) error {
	evs := make([]events.Event, n)
	for i := range evs {
		evs[i] = event("bench", strconv.Itoa(i), 1)
	}
	pool := d.Pool(pg.RoleLifecycle)
	return func(ctx context.Context) error {
		return pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := events.Append(ctx, tx, evs...)
			return err
		})
	}
}

// measure times round, and calls prepare before each round, which is not timed. The pool's first connection does the
// work.
func measure(b *testing.B, pool *pgxpool.Pool, n int, prepare, round func(ctx context.Context) error) {
	b.Helper()
	var pid int
	if err := pool.QueryRow(b.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		b.Fatal(err)
	}
	var took time.Duration
	before := cpu(b, pid)
	for b.Loop() {
		b.StopTimer()
		if prepare != nil {
			if err := prepare(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		b.StartTimer()
		began := time.Now()
		if err := round(b.Context()); err != nil {
			b.Fatal(err)
		}
		took += time.Since(began)
	}
	per := float64(b.N*n) * float64(time.Microsecond)
	b.ReportMetric(float64(took)/per, "µs/event")
	b.ReportMetric(float64(cpu(b, pid)-before)/per, "db-µs/event")
}

// cpu returns the processor time that a process has used so far.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return 0 // only Linux has it
	}
	ns, err := strconv.ParseInt(strings.Fields(string(raw))[0], 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return time.Duration(ns)
}
