package scan

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
)

// BeforeIDs and LastID enclose all ids. A page is of ids above the first and up to the last.
const (
	BeforeIDs = "00000000-0000-0000-0000-000000000000"
	LastID    = "ffffffff-ffff-ffff-ffff-ffffffffffff"
)

// Table is the table of a type of rows.
type Table struct {
	Name, ID string
	Live     string // the condition, over x, that a row's life has not ended
}

// Tables are the tables that are read in pages, by the type of their rows.
var Tables = map[string]Table{
	"workspace":  {Name: "lifecycle.workspace", ID: "id", Live: "x.state <> 'decommissioned'"},
	"run":        {Name: "lifecycle.saga_run", ID: "id", Live: "x.finished_at IS NULL"},
	"allocation": {Name: "lifecycle.allocation", ID: "allocation_id", Live: "x.state <> 'released'"},
	"node":       {Name: "lifecycle.node_gate", ID: "node_id"}, // not guarded; sweeps read it in pages too
}

// endOfPage returns the last id of a page that begins after $1 and has $2 rows more than one; nothing if there are not
// so many.
var endOfPage = pg.DefineDynamic(pg.RoleLifecycle, "scan.end_of_page", func(rowType string) string {
	src := Tables[rowType]
	return `SELECT x.` + src.ID + `::text FROM ` + src.Name + ` x WHERE x.` + src.ID + ` > $1::uuid ORDER BY x.` +
		src.ID + ` OFFSET $2 LIMIT 1`
}, "workspace", "run", "allocation", "node")

// endsFor is how long later checks reuse the ends of pages. Ends that were found twice, one time after the other, are
// reused for stableTimes as long: where few rows are inserted, they need not be looked up by each sweep.
const (
	endsFor     = 10 * time.Second
	stableTimes = 6
)

// Pages divide the ids of each type of rows into pages. Together the pages contain every id, wherever they end.
type Pages struct {
	Size int // how many rows a page has
	// For is how long the ends of pages are reused, and stableTimes as long if they were found as they had been before: a
	// page has more rows than Size only by those inserted then.
	For time.Duration

	db    pg.Querier
	found *foundEnds
}

// foundEnds are the ends of pages as they were found last.
type foundEnds struct {
	mu sync.Mutex
	of map[string]ends
}

// NewPages returns pages of size rows.
func NewPages(db pg.Querier, size int) *Pages {
	return &Pages{Size: size, For: endsFor, db: db, found: &foundEnds{}}
}

// Over returns the same pages, read over q: a transaction that reads several tables costs one commit.
func (p *Pages) Over(q pg.Querier) *Pages {
	return &Pages{Size: p.Size, For: p.For, db: q, found: p.found}
}

type ends struct {
	ids   []string // the last is lastID
	at    time.Time
	times int // how many times For they are reused
}

func (p *Pages) known(rowType string) []string {
	p.found.mu.Lock()
	defer p.found.mu.Unlock()
	if e := p.found.of[rowType]; time.Since(e.at) < time.Duration(e.times)*p.For {
		return e.ids
	}
	return nil
}

func (p *Pages) keep(rowType string, ids []string, at time.Time) {
	p.found.mu.Lock()
	defer p.found.mu.Unlock()
	if p.found.of == nil {
		p.found.of = map[string]ends{}
	}
	times := 1
	if slices.Equal(ids, p.found.of[rowType].ids) {
		times = stableTimes
	}
	p.found.of[rowType] = ends{ids: ids, at: at, times: times}
}

// Each calls fn for each page of the ids of a type of rows, first to last. Together the pages contain every id, also
// ids without a row.
func (p *Pages) Each(ctx context.Context, rowType string,
	fn func(ctx context.Context, after, upTo string) error,
) error {
	known, began := p.known(rowType), time.Now()
	var found []string
	for after := BeforeIDs; after != LastID; {
		var upTo string
		if known != nil {
			upTo = known[len(found)]
		} else {
			var err error
			if upTo, err = p.endOfPage(ctx, rowType, after); err != nil {
				return err
			}
		}
		if err := fn(ctx, after, upTo); err != nil {
			return err
		}
		found, after = append(found, upTo), upTo
	}
	if known == nil {
		p.keep(rowType, found, began)
	}
	return nil
}

func (p *Pages) endOfPage(ctx context.Context, rowType, after string) (string, error) {
	upTo, err := pg.Value[string](ctx, p.db, endOfPage.For(rowType), after, p.Size-1)
	switch {
	case pg.IsNoRows(err):
		return LastID, nil
	case err != nil:
		return "", fmt.Errorf("find the end of a page of %ss: %w", rowType, err)
	}
	return upTo, nil
}

// All reads rows of all workspaces, a page of workspaces at a time. The statement takes the bounds of a page, and
// then args.
func All[T any](ctx context.Context, p *Pages, rowType string, statement *pg.Statement, args ...any) ([]T,
	error,
) {
	var out []T
	err := p.Each(ctx, rowType, func(ctx context.Context, after, upTo string) error {
		rows, err := pg.All[T](ctx, p.db, statement, append([]any{after, upTo}, args...)...)
		out = append(out, rows...)
		return err
	})
	return out, err
}

// Page is the condition, over the column of an id, that it is in the page of $1 and $2.
func Page(id string) string { return id + ` > $1::uuid AND ` + id + ` <= $2::uuid` }
