package guard

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/findings/scan"
)

// RowChanged is the kind of the findings of the guard.
const RowChanged = commonv1.FindingKind_FINDING_KIND_ROW_CHANGED_OUTSIDE

// rowKey identifies a row.
type rowKey struct{ rowType, id string }

// guarded are the types of rows that sagas own, in the order in which they are scanned.
var guarded = []string{"workspace", "run", "allocation"}

// Guard is the drift guard. It remembers what its last scan found.
type Guard struct {
	pool  *pgxpool.Pool
	pages *scan.Pages

	mu   sync.Mutex // held by a scan
	last known
}

// known is what a scan leaves for the next one.
type known struct {
	watched watch           // the triggers of rows, as the last scan found them
	misfits map[rowKey]bool // the rows whose seal did not fit in the last scan
	// unlisted is true if there was evidence in the last scan that the triggers had not listed.
	unlisted bool
}

// round is one scan in its transaction.
type round struct {
	db    pg.Querier
	pages *scan.Pages
	known
}

// NewGuard returns a guard whose first scan reads all live rows.
func NewGuard(db *pgxpool.Pool, pages *scan.Pages) *Guard { return &Guard{pool: db, pages: pages} }

// Scan finds the rows that were changed outside their saga. Triggers record evidence of each write that the product did
// not make; the rows themselves are read only if the triggers may have been kept from firing since the last scan. It
// reads in one transaction, of which each statement sees what is committed by then. A scan that fails leaves nothing
// for the next one. One scan runs at a time.
func (g *Guard) Scan(ctx context.Context) ([]finding.Seen, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var seen []finding.Seen
	var next known
	err := pg.InTx(ctx, g.pool, func(ctx context.Context, tx pgx.Tx) error {
		r := round{db: tx, pages: g.pages.Over(tx), known: g.last}
		var err error
		seen, err = r.scan(ctx)
		next = r.known
		return err
	})
	if err != nil {
		return nil, err
	}
	g.last = next
	return seen, nil
}

func (g *round) scan(ctx context.Context) ([]finding.Seen, error) {
	open, err := g.openRows(ctx)
	if err != nil {
		return nil, err
	}
	now, err := pg.One[watch](ctx, g.db, readWatch)
	if err != nil {
		return nil, fmt.Errorf("look at the triggers of rows: %w", err)
	}
	all := now.Stamp != g.watched.Stamp || !now.Armed
	broken, err := g.brokenSeals(ctx, open, all, cmp.Or(g.watched.Behind, now.Behind))
	if err != nil {
		return nil, err
	}
	seen, err := g.withEvidence(ctx, broken, open, all)
	if err == nil {
		g.watched = now
	}
	return seen, err
}

// watch is the state of the triggers as a scan found it.
type watch struct {
	Stamp  string `db:"stamp"`  // changes with each change of the tables' triggers, functions or shape
	Armed  bool   `db:"armed"`  // every trigger is there and fires always
	Behind string `db:"behind"` // a transaction that is older than every write that comes after this scan
}

// readWatch reads the state of the triggers that guard rows, and of the one that lists their evidence. A transaction
// that turns a trigger off, replaces it or its function, or rewrites a table leaves another xmin on a row of the
// catalogue, even if it restores everything before it ends.
var readWatch = pg.Define(pg.RoleLifecycle, "guard.read_watch", `
	WITH tab AS (SELECT c.oid, c.xmin, c.relfilenode, c.relname FROM pg_class c
		WHERE c.relnamespace = 'lifecycle'::regnamespace AND c.relname IN ('workspace', 'saga_run', 'allocation',
			'row_evidence')),
	trig AS (SELECT t.tgrelid, t.tgname, t.tgenabled, t.xmin FROM pg_trigger t JOIN tab ON tab.oid = t.tgrelid
		WHERE NOT t.tgisinternal),
	func AS (SELECT p.oid, p.xmin FROM pg_proc p WHERE p.pronamespace = 'lifecycle'::regnamespace
		AND p.proname IN ('seal_row', 'seal_fits', 'fits_former_shape', 'leave_evidence', 'evidence_opens'))
	SELECT concat_ws(';', (SELECT string_agg(concat_ws(',', oid, xmin, relfilenode), ' ' ORDER BY oid) FROM tab),
			(SELECT string_agg(concat_ws(',', tgrelid, tgname, tgenabled, xmin), ' ' ORDER BY tgrelid, tgname) FROM trig),
			(SELECT string_agg(concat_ws(',', oid, xmin), ' ' ORDER BY oid) FROM func)) AS stamp,
		(SELECT count(*) = 4 FROM trig WHERE tgname IN ('seal_row', 'evidence_opens') AND tgenabled = 'A') AS armed,
		pg_snapshot_xmin(pg_current_snapshot())::text AS behind`)

// misfit is a row whose seal does not fit.
type misfit struct {
	ID    string `db:"id"`
	Image []byte `db:"image"`
}

// misfits reads the rows of a page whose seal does not fit. It reads the rows that are live, those that were written
// since the transaction $3, and those whose ids are in $4.
var misfits = pg.DefineDynamic(pg.RoleLifecycle, "guard.misfits", func(rowType string) string {
	src := scan.Tables[rowType]
	return `SELECT x.` + src.ID + `::text AS id, to_jsonb(x) - 'seal' AS image FROM ` + src.Name + ` x
		WHERE ` + scan.Page("x."+src.ID) + ` AND (` + src.Live + ` OR age(x.xmin) <= age($3::text::xid8::xid)
			OR x.` + src.ID + ` = ANY ($4::uuid[]))
			AND NOT lifecycle.seal_fits(x)`
}, guarded...)

// misfitsAmong reads which of some rows do not fit their seal.
var misfitsAmong = pg.DefineDynamic(pg.RoleLifecycle, "guard.misfits_among", func(rowType string) string {
	src := scan.Tables[rowType]
	return `SELECT x.` + src.ID + `::text AS id, to_jsonb(x) - 'seal' AS image FROM ` + src.Name + ` x
		WHERE x.` + src.ID + ` = ANY ($1::uuid[]) AND NOT lifecycle.seal_fits(x)`
}, guarded...)

// brokenSeals finds rows that were written while their trigger did not fire and were not written since: their seal does
// not fit. If all is set, as in the first scan of this process, after the triggers were changed, and while one of them
// does not fire, it reads all live rows and those written since the transaction behind; otherwise only those whose seal
// did not fit before.
func (g *round) brokenSeals(ctx context.Context, open map[finding.Key]bool, all bool, behind string) ([]finding.Seen,
	error,
) {
	known := g.knownMisfits(open)
	var out []finding.Seen
	found := map[rowKey]bool{}
	for _, rowType := range guarded {
		var rows []misfit
		var err error
		switch {
		case all:
			rows, err = scan.All[misfit](ctx, g.pages, rowType, misfits.For(rowType), behind, known[rowType])
		case len(known[rowType]) > 0:
			rows, err = pg.All[misfit](ctx, g.db, misfitsAmong.For(rowType), known[rowType])
		}
		if err != nil {
			return nil, fmt.Errorf("look for broken seals: %w", err)
		}
		for _, r := range rows {
			image, err := decode(r.Image)
			if err != nil {
				return nil, err
			}
			found[rowKey{rowType, r.ID}] = true
			out = append(out, brokenSeal(rowType, r.ID, image))
		}
	}
	g.misfits = found
	return out, nil
}

// knownMisfits returns the ids of the rows, by type, whose seal did not fit in the last scan, or which have an open
// finding of a broken seal.
func (g *round) knownMisfits(open map[finding.Key]bool) map[string][]string {
	known := maps.Clone(g.misfits)
	if known == nil {
		known = map[rowKey]bool{}
	}
	for k, broken := range open {
		if broken {
			known[rowKey{k.SubjectType, k.SubjectID}] = true
		}
	}
	out := map[string][]string{}
	for k := range known {
		out[k.rowType] = append(out[k.rowType], k.id)
	}
	return out
}

// SealBroken is the value of the field seal in a finding on a row whose seal does not fit.
const SealBroken = "broken"

// brokenSeal returns the finding of a row whose seal does not fit. The row's former content is not known.
func brokenSeal(rowType, id string, image map[string]any) finding.Seen {
	tr := &trace{
		rowType: rowType, id: id, was: true, is: true, blind: true, fields: map[string]change{}, image: image,
		last: "its seal does not fit: it was written while its trigger did not fire",
	}
	x := tr.seen()
	x.After["seal"] = SealBroken
	delete(x.After, "changes")
	return x
}

// changedOutside returns the beginning of the summary of every finding on a row.
func changedOutside(rowType, id string) string {
	return fmt.Sprintf("the row of %s %s was changed outside its saga: ", rowType, id)
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}
