package keyset

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A report of a replica that has a row costs one record of the write-ahead log besides its commit.
func TestAReportIsOneRecord(t *testing.T) {
	b := newBench(t)
	pool := b.db.Pool(pg.RoleLifecycle)
	report := []any{ids.New(), []string{"a"}, []string{"b"}, []string{}}
	if _, err := pg.Exec(b.ctx, pool, saveReplica, report...); err != nil {
		t.Fatal(err)
	}
	if n := testkit.Records(t, pool, saveReplica.SQL(), report...); n != 1 {
		t.Errorf("a report wrote %d records, want 1", n)
	}
}
