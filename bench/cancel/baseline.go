package cancel

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The baseline is what a cancel cannot do without: one durable commit of a single row, in one round trip, by one client on a connection of its own.

const baselineCommits = 200

func prepareBaseline(ctx context.Context, owner *pgxpool.Pool) error {
	_, err := owner.Exec(ctx, `CREATE SCHEMA IF NOT EXISTS bench; DROP TABLE IF EXISTS bench.round_trips;
		CREATE TABLE bench.round_trips (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n bigint NOT NULL)`)
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

// commits answers how long each of a number of single-row commits took.
func commits(ctx context.Context, owner *pgxpool.Pool) ([]time.Duration, error) {
	conn, err := owner.Acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("measure commits: %w", err)
	}
	defer conn.Release()
	took := make([]time.Duration, 0, baselineCommits)
	for n := range baselineCommits {
		began := time.Now()
		if _, err := conn.Exec(ctx, `INSERT INTO bench.round_trips (n) VALUES ($1)`, n); err != nil {
			return nil, fmt.Errorf("measure commits: %w", err)
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}
