package findings

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// A page is of ids above the first and up to the last.
const (
	beforeIDs = "00000000-0000-0000-0000-000000000000"
	lastID    = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// endOfPage returns the last id of a page that begins after $1 and has $2 rows more than one; nothing if there are not
// so many.
var endOfPage = pg.DefineDynamic(pg.RoleLifecycle, "findings.end_of_page", func(rowType string) string {
	src := sources[rowType]
	return `SELECT x.` + src.id + `::text FROM ` + src.table + ` x WHERE x.` + src.id + ` > $1::uuid ORDER BY x.` +
		src.id + ` OFFSET $2 LIMIT 1`
}, "workspace", "run", "allocation", "node")

// boundsFor is how long later checks reuse the ends of pages: a page has more rows than Config.Page only by the rows
// inserted in that time.
const boundsFor = 10 * time.Second

// bounds are the ends of the pages of each type of rows, as they were found last. Together the pages contain every id,
// wherever they end.
type bounds struct {
	mu sync.Mutex
	of map[string]ends
}

type ends struct {
	ids []string // the last is lastID
	at  time.Time
}

func (b *bounds) known(rowType string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.of[rowType]; time.Since(e.at) < boundsFor {
		return e.ids
	}
	return nil
}

func (b *bounds) keep(rowType string, ids []string, at time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.of == nil {
		b.of = map[string]ends{}
	}
	b.of[rowType] = ends{ids: ids, at: at}
}

// pages calls fn for each page of the ids of a type of rows, first to last. Together the pages contain every id, also
// ids without a row.
func (s *Sweeper) pages(ctx context.Context, rowType string,
	fn func(ctx context.Context, after, upTo string) error,
) error {
	known, began := s.bounds.known(rowType), time.Now()
	var found []string
	for after := beforeIDs; after != lastID; {
		var upTo string
		if known != nil {
			upTo = known[len(found)]
		} else {
			var err error
			if upTo, err = s.endOfPage(ctx, rowType, after); err != nil {
				return err
			}
		}
		if err := fn(ctx, after, upTo); err != nil {
			return err
		}
		found, after = append(found, upTo), upTo
	}
	if known == nil {
		s.bounds.keep(rowType, found, began)
	}
	return nil
}

func (s *Sweeper) endOfPage(ctx context.Context, rowType, after string) (string, error) {
	upTo, err := pg.Value[string](ctx, s.deps.DB, endOfPage.For(rowType), after, s.cfg.Page-1)
	switch {
	case pg.IsNoRows(err):
		return lastID, nil
	case err != nil:
		return "", fmt.Errorf("find the end of a page of %ss: %w", rowType, err)
	}
	return upTo, nil
}

// inPages reads rows of all workspaces, a page of workspaces at a time. The statement takes the bounds of a page, and
// then args.
func inPages[T any](ctx context.Context, s *Sweeper, rowType string, statement *pg.Statement, args ...any) ([]T,
	error,
) {
	var out []T
	err := s.pages(ctx, rowType, func(ctx context.Context, after, upTo string) error {
		rows, err := pg.All[T](ctx, s.deps.DB, statement, append([]any{after, upTo}, args...)...)
		out = append(out, rows...)
		return err
	})
	return out, err
}

// page is the condition, over the column of an id, that it is in the page of $1 and $2.
func page(id string) string { return id + ` > $1::uuid AND ` + id + ` <= $2::uuid` }
