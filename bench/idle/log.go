package idle

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// The records of the write-ahead log are read by an extension that comes with the server; some packages of Postgres
// leave it out.
var (
	hasInspect = pg.Define(pg.RoleOwner, "idle.has_inspect",
		`SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_walinspect')`)
	createInspect = pg.DefineUnprepared(pg.RoleOwner, "idle.create_inspect", "the bench makes the extension",
		func(struct{}) string { return `CREATE EXTENSION IF NOT EXISTS pg_walinspect` })
	readRecords = pg.DefineUnprepared(pg.RoleOwner, "idle.read_records", "the bench makes the extension",
		func(struct{}) string {
			return `
	SELECT s."resource_manager/record_type" AS name, s.count, s.record_size::bigint AS bytes, s.fpi_size::bigint AS pages
	FROM pg_get_wal_stats('0/0'::pg_lsn + $1::numeric, LEAST('0/0'::pg_lsn + $2::numeric, pg_current_wal_flush_lsn()),
		true) s
	WHERE s.count > 0 ORDER BY s.combined_size DESC, 1`
		})
)

// kind is the number and the bytes of the records of one kind in the write-ahead log.
type kind struct {
	Name  string `db:"name"`
	Count int64  `db:"count"`
	Bytes int64  `db:"bytes"` // without whole pages
	Pages int64  `db:"pages"` // bytes of whole pages
}

// records is the write-ahead log of a stretch by kind.
type records struct {
	kinds   []kind
	unknown string // why the server does not report them; empty if it does
}

// records reads the records between two positions.
func (s statements) records(ctx context.Context, from, to int64) (records, error) {
	switch {
	case s.conn == nil:
		return records{unknown: "the bench has no administrator's connection to the server"}, nil
	case !s.inspects:
		return records{unknown: "the server has no pg_walinspect"}, nil
	}
	list, err := pg.All[kind](ctx, s.conn, readRecords.For(struct{}{}), from, to)
	if err != nil {
		return records{}, fmt.Errorf("read the records of the write-ahead log: %w", err)
	}
	return records{kinds: list}, nil
}

// pages returns the bytes of whole pages.
func (r records) pages() int64 {
	var n int64
	for _, k := range r.kinds {
		n += k.Pages
	}
	return n
}

// ofVacuum are the kinds of records that a vacuum alone writes.
var ofVacuum = []string{
	"Heap2/PRUNE_VACUUM_SCAN", "Heap2/PRUNE_VACUUM_CLEANUP", "Heap2/VISIBLE", "Heap2/VACUUM",
	"Heap2/FREEZE_PAGE", "Btree/VACUUM",
}

// vacuumed returns the bytes that a vacuum wrote, whole pages apart. The statistics of an analyze are rows as any.
func (r records) vacuumed() int64 {
	var n int64
	for _, k := range r.kinds {
		if slices.Contains(ofVacuum, k.Name) {
			n += k.Bytes
		}
	}
	return n
}

// describe adds records and bytes a minute by kind to the details of a result.
func (r records) describe(details map[string]any, length time.Duration) {
	for i, k := range r.kinds {
		per := func(n int64) float64 { return math.Round(float64(n) / length.Minutes()) }
		details[fmt.Sprintf("log %02d %s", i+1,
			k.Name)] = fmt.Sprintf("%.0f records a minute, %.0f bytes, and %.0f of whole pages", per(k.Count), per(k.Bytes),
			per(k.Pages))
	}
}
