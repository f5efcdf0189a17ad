package testkit

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Records runs a statement and returns how many records of the write-ahead log it wrote, its commit left out.
func Records(tb testing.TB, pool *pgxpool.Pool, sql string, args ...any) int {
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
