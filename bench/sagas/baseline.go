package sagas

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The baseline is what this Postgres can commit at all: one durable single-row INSERT a transaction, as cheap as a client can make it. Each of the
// clients has a connection of its own with the statement prepared, there is no explicit BEGIN (one round trip a commit), the row is one bigint,
// and the primary key grows, so that its pages stay hot.

const baselineClients = 16

func prepareBaseline(ctx context.Context, owner *pgxpool.Pool) error {
	_, err := owner.Exec(ctx, `CREATE SCHEMA IF NOT EXISTS bench; DROP TABLE IF EXISTS bench.commits;
		CREATE TABLE bench.commits (id bigint GENERATED ALWAYS AS IDENTITY (CACHE 100) PRIMARY KEY, n bigint NOT NULL)`)
	if err != nil {
		return fmt.Errorf("make baseline table: %w", err)
	}
	return nil
}

func dropBaseline(ctx context.Context, owner *pgxpool.Pool) error {
	if _, err := owner.Exec(ctx, `DROP SCHEMA bench CASCADE`); err != nil {
		return fmt.Errorf("drop baseline table: %w", err)
	}
	return nil
}

// commits counts single-row commits for the length of time and answers how many there were a second.
func commits(ctx context.Context, owner *pgxpool.Pool, length time.Duration) (float64, error) {
	var done atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, baselineClients)
	begin := time.Now()
	stop := begin.Add(length)
	for range baselineClients {
		wg.Go(func() {
			conn, err := owner.Acquire(ctx)
			if err != nil {
				errs <- err
				return
			}
			defer conn.Release()
			for n := int64(0); time.Now().Before(stop); n++ {
				if _, err := conn.Exec(ctx, `INSERT INTO bench.commits (n) VALUES ($1)`, n); err != nil {
					errs <- err
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	select {
	case err := <-errs:
		return 0, fmt.Errorf("measure commits: %w", err)
	default:
		return float64(done.Load()) / took.Seconds(), nil
	}
}
