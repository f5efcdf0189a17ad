package findings

import (
	"context"
	"fmt"

	"github.com/gpuaas/mesh/internal/pg"
)

// A page is of ids above the first and up to the last.
const (
	beforeIDs = "00000000-0000-0000-0000-000000000000"
	lastID    = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// endOfPage returns the last id of a page that begins after $1 and has $2 rows more than one; nothing if there are not so many.
var endOfPage = pg.DefineDynamic(pg.RoleLifecycle, "findings.end_of_page", func(rowType string) string {
	src := sources[rowType]
	return `SELECT x.` + src.id + `::text FROM ` + src.table + ` x WHERE x.` + src.id + ` > $1::uuid ORDER BY x.` + src.id + ` OFFSET $2 LIMIT 1`
}, "workspace", "run", "allocation", "node")

// pages calls fn for each page of the ids of a type of rows, first to last. Together the pages have every id, also those that have no such row.
func (s *Sweeper) pages(ctx context.Context, rowType string, fn func(ctx context.Context, after, upTo string) error) error {
	for after := beforeIDs; after != lastID; {
		upTo, err := pg.Value[string](ctx, s.deps.DB, endOfPage.For(rowType), after, s.cfg.Page-1)
		switch {
		case pg.IsNoRows(err):
			upTo = lastID
		case err != nil:
			return fmt.Errorf("find the end of a page of %ss: %w", rowType, err)
		}
		if err := fn(ctx, after, upTo); err != nil {
			return err
		}
		after = upTo
	}
	return nil
}

// inPages reads rows of all workspaces, a page of workspaces at a time. The statement takes the bounds of a page, and then args.
func inPages[T any](ctx context.Context, s *Sweeper, rowType string, statement *pg.Statement, args ...any) ([]T, error) {
	var out []T
	err := s.pages(ctx, rowType, func(ctx context.Context, after, upTo string) error {
		rows, err := pg.All[T](ctx, s.deps.DB, statement, append([]any{after, upTo}, args...)...)
		out = append(out, rows...)
		return err //nolint:wrapcheck // the caller says what it reads
	})
	return out, err
}

// page is the condition, over the column of an id, that it is in the page of $1 and $2.
func page(id string) string { return id + ` > $1::uuid AND ` + id + ` <= $2::uuid` }
