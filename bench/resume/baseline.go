package resume

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The baseline is what a resumption cannot do without: one durable commit of a single row, which takes the run over, by one client on a connection of its own.

const baselineCommits = 200

func prepareBaseline(ctx context.Context, owner *pgxpool.Pool) error {
	_, err := owner.Exec(ctx, `CREATE SCHEMA bench_resume; CREATE TABLE bench_resume.round_trips (n bigint PRIMARY KEY)`)
	if err != nil {
		return fmt.Errorf("make baseline table: %w", err)
	}
	return nil
}

func dropBaseline(ctx context.Context, owner *pgxpool.Pool) error {
	if _, err := owner.Exec(ctx, `DROP SCHEMA bench_resume CASCADE`); err != nil {
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
		if _, err := conn.Exec(ctx, `INSERT INTO bench_resume.round_trips (n) VALUES ($1)`, n); err != nil {
			return nil, fmt.Errorf("measure commits: %w", err)
		}
		took = append(took, time.Since(began))
	}
	return took, nil
}
