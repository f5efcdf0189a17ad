package testkit

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Records runs a statement three times and returns the fewest records of the write-ahead log that it wrote, its commit
// left out: a run may also prune a page, or find one that is written whole after a checkpoint.
func Records(tb testing.TB, pool *pgxpool.Pool, sql string, args ...any) int {
	tb.Helper()
	n := records(tb, pool, sql, args...)
	for range 2 {
		n = min(n, records(tb, pool, sql, args...))
	}
	return n
}

func records(tb testing.TB, pool *pgxpool.Pool, sql string, args ...any) int {
	tb.Helper()
	var raw []byte
	if err := pool.QueryRow(tb.Context(), "EXPLAIN (ANALYZE, WAL, FORMAT JSON) "+sql, args...).Scan(&raw); err != nil {
		tb.Fatal(err)
	}
	var plans []struct {
		Plan struct {
			Records int `json:"WAL Records"`
			Plans   []struct {
				Records int `json:"WAL Records"`
			} `json:"Plans"`
		} `json:"Plan"`
	}
	if err := json.Unmarshal(raw, &plans); err != nil || len(plans) != 1 {
		tb.Fatalf("read plan %s: %v", raw, err)
	}
	n := plans[0].Plan.Records
	for _, p := range plans[0].Plan.Plans {
		n = max(n, p.Records)
	}
	return n
}
