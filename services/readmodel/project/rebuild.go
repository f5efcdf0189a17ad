package project

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// Difference is a table that differs from its rebuild.
type Difference struct {
	Table string `db:"-"`
	// Missing rows are in the rebuild and not in the projection (or differ there); Surplus the reverse.
	Missing int64 `db:"missing"`
	Surplus int64 `db:"surplus"`
	// Example is the key of one of them.
	Example string `db:"example"`
}

// Report is the result of a rebuild or of a comparison with one.
type Report struct {
	Position int64 // of the cursor
	Events   int64 // applied anew
	Parked   int   // left out, as the projection did
	// Unapplied events were left out because they cannot be applied. If a later event of the same batch replaced the row
	// of such an event, the projection itself never tried to write that row, so the event is not parked.
	Unapplied   int
	Cut         bool  // the beginning of the log was cut: only rows that its events name were compared, or replaced
	Announced   int64 // rows that their owners announced for a rebuild
	Differences []Difference
	Took        time.Duration
}

// Equal reports whether projection and rebuild are the same.
func (r Report) Equal() bool { return len(r.Differences) == 0 }

// rebuildLock is the key of the advisory lock that keeps rebuilds from running at the same time.
const rebuildLock = 0x72656275

// Verify makes a fresh projection from the log up to the cursor in scratch tables and compares it with the real one, in
// both directions. Of a log whose beginning was cut it compares the rows that the remaining events name. Everything
// happens in one transaction with one snapshot, which is rolled back: nothing changes, and the projection goes on
// meanwhile.
func (p *Projector) Verify(ctx context.Context) (Report, error) {
	began := time.Now()
	tx, err := p.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return Report{}, fmt.Errorf("verify projections: %w", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // nothing is kept
	report, err := p.replayBeside(ctx, tx, false)
	if err != nil {
		return Report{}, fmt.Errorf("verify projections: %w", err)
	}
	for _, name := range TableNames() {
		d, err := compare(ctx, tx, name, report.Cut)
		if err != nil {
			return Report{}, fmt.Errorf("verify projections: %w", err)
		}
		if d.Missing+d.Surplus > 0 {
			report.Differences = append(report.Differences, d)
		}
	}
	d, err := pg.One[Difference](ctx, tx, compareCounts)
	if err != nil {
		return Report{}, fmt.Errorf("verify projections: compare counts of workspaces: %w", err)
	}
	if d.Table = countTable; d.Missing+d.Surplus > 0 {
		report.Differences = append(report.Differences, d)
	}
	report.Took = time.Since(began)
	return report, nil
}

// countTable has the counts of workspaces and live runs. No event sets them, so they are compared with the rows that
// they count.
const countTable = "workspace_count"

// compareCounts counts the rows that differ from what readmodel.recount_workspaces would write; a row of zeros is as
// good as none.
var compareCounts = pg.Define(pg.RoleReadmodel, "project.compare_counts", `
	WITH counted AS (
		SELECT y.tenant_id, sum(y.w) AS workspaces, sum(y.a) AS active, sum(y.r) AS live_runs FROM (
			SELECT x.tenant_id, 1 AS w, (x.state = 'active')::integer AS a, 0 AS r FROM readmodel.workspace x
				WHERE x.state <> 'decommissioned'
			UNION ALL SELECT coalesce(x.tenant_id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'), 0, 0, 1 FROM readmodel.run x
				WHERE x.live) y
		GROUP BY 1
	), kept AS (
		SELECT c.tenant_id, c.workspaces, c.active, c.live_runs FROM readmodel.workspace_count c
			WHERE (c.workspaces, c.active, c.live_runs) <> (0, 0, 0)
	), missing AS (SELECT * FROM counted EXCEPT SELECT * FROM kept), surplus AS (SELECT * FROM kept EXCEPT SELECT *
		FROM counted)
	SELECT (SELECT count(*) FROM missing) AS missing, (SELECT count(*) FROM surplus) AS surplus,
		coalesce((SELECT x.tenant_id::text FROM missing x LIMIT 1), (SELECT x.tenant_id::text FROM surplus x
			LIMIT 1), '') AS example`)

// Rebuild makes the projection anew up to the cursor, in one transaction: readers see the old one until then. The
// consumer waits meanwhile. If the beginning of the log was cut, the owners announce their live rows first; a row that
// is over and that no remaining event names stays as it is; and a live row that neither an event nor an owner names is
// deleted.
func (p *Projector) Rebuild(ctx context.Context, owners ...Owner) (Report, error) {
	report, err := p.rebuild(ctx, owners)
	if err != nil {
		return Report{}, fmt.Errorf("rebuild projections: %w", err)
	}
	p.advanced.Notify()
	p.queued.Notify()
	p.wake.Notify()
	return report, nil
}

//nolint:nonamedreturns // the deferred release joins its error
func (p *Projector) rebuild(ctx context.Context, owners []Owner) (report Report, err error) {
	began := time.Now()
	// This comes before the query whether events were cut, so that the events that exist now exist until the end of the
	// rebuild.
	release, err := p.keepEvents(ctx)
	if err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, release(ctx)) }()
	cut, err := pg.Value[bool](ctx, p.db, isCut)
	if err != nil {
		return Report{}, fmt.Errorf("ask whether history was cut: %w", err)
	}
	var announced announcement
	if cut {
		if announced, err = p.announceAll(ctx, owners); err != nil {
			return Report{}, err
		}
	}
	err = pg.InTx(ctx, p.db, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if !cut {
			if report, err = p.replay(ctx, tx, applier{sql: newStatements("")}, true, true); err != nil {
				return err
			}
			if err := afterRebuild(ctx, tx, report.Position); err != nil {
				return err
			}
			return stillUncut(ctx, tx)
		}
		if report, err = p.replayBeside(ctx, tx, true); err != nil {
			return err
		}
		if err := announced.applied(ctx, tx, report); err != nil {
			return err
		}
		if err := merge(ctx, tx); err != nil {
			return err
		}
		return afterRebuild(ctx, tx, report.Position)
	})
	report.Cut, report.Announced, report.Took = cut, announced.rows, time.Since(began)
	return report, err
}

var recount = pg.Define(pg.RoleReadmodel, "project.recount_workspaces", `SELECT readmodel.recount_workspaces()`)

// afterRebuild recomputes the counts of workspaces and live runs, queues what may be touched otherwise now, and has all
// watchers take a new snapshot. The transaction has locked the cursor, so nothing else changes what is counted.
func afterRebuild(ctx context.Context, tx pgx.Tx, pos int64) error {
	if _, err := pg.Exec(ctx, tx, recount); err != nil {
		return fmt.Errorf("count workspaces anew: %w", err)
	}
	if err := queueEverything(ctx, tx); err != nil {
		return err
	}
	return notifyWatchers(ctx, tx, KindRebuilt, pos)
}

// stillUncut returns an error if a cut that was under way when the rebuild began has deleted events that the rebuild
// has not read.
func stillUncut(ctx context.Context, tx pgx.Tx) error {
	cut, err := pg.Value[bool](ctx, tx, isCut)
	if err != nil {
		return fmt.Errorf("ask whether history was cut: %w", err)
	}
	if cut {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE,
			"history was cut for the first time while the projections were made again",
			fault.RetryAfter(time.Second))
	}
	return nil
}

// replayBeside applies the log to the scratch tables.
func (p *Projector) replayBeside(ctx context.Context, tx pgx.Tx, lock bool) (Report, error) {
	cut, err := pg.Value[bool](ctx, tx, isCut)
	if err != nil {
		return Report{}, fmt.Errorf("ask whether history was cut: %w", err)
	}
	report, err := p.replay(ctx, tx, applier{sql: newStatements(scratchPrefix)}, lock, false)
	report.Cut = cut
	return report, err
}

var (
	keepRebuildsApart = pg.Define(pg.RoleReadmodel, "project.keep_rebuilds_apart", `
	SELECT set_config('statement_timeout', '0', true), pg_advisory_xact_lock($1)`)
	cursorPosition = pg.DefineDynamic(pg.RoleReadmodel, "project.cursor", func(lock bool) string {
		if lock {
			return `SELECT pos FROM readmodel.event_cursor WHERE name = $1 FOR UPDATE`
		}
		return `SELECT pos FROM readmodel.event_cursor WHERE name = $1`
	}, false, true)
	parkedPositions = pg.Define(pg.RoleReadmodel, "project.parked_positions", `
	SELECT pos FROM readmodel.parked_event WHERE consumer = $1 ORDER BY pos`)
)

// replay applies the events up to the cursor. With lock it locks the cursor; with replace it empties the tables first.
func (p *Projector) replay(ctx context.Context, tx pgx.Tx, a applier, lock, replace bool) (Report, error) {
	var report Report
	if _, err := pg.Exec(ctx, tx, keepRebuildsApart, rebuildLock); err != nil {
		return report, fmt.Errorf("keep other rebuilds away: %w", err)
	}
	var err error
	if report.Position, err = pg.Value[int64](ctx, tx, cursorPosition.For(lock), ConsumerName); err != nil &&
		!pg.IsNoRows(err) {
		return report, fmt.Errorf("read cursor: %w", err)
	}
	if replace {
		for _, name := range TableNames() {
			if _, err := pg.Exec(ctx, tx, emptyTable.For(target{"", name})); err != nil {
				return report, fmt.Errorf("empty %s: %w", name, err)
			}
		}
	}
	parked, err := pg.Values[int64](ctx, tx, parkedPositions, ConsumerName)
	if err != nil {
		return report, fmt.Errorf("read parked events: %w", err)
	}
	report.Parked = len(parked)
	for after := int64(0); after < report.Position; {
		records, next, err := events.Read(ctx, tx, after, Kinds(), eventsTogether)
		if err != nil {
			return report, fmt.Errorf("read the log: %w", err)
		}
		records = slices.DeleteFunc(records, func(r events.Record) bool {
			_, skip := slices.BinarySearch(parked, r.Pos)
			return skip || r.Pos > report.Position
		})
		unapplied, err := a.applyAnew(ctx, tx, records, lock)
		if err != nil {
			return report, err
		}
		report.Events += int64(len(records) - unapplied)
		report.Unapplied += unapplied
		if next <= after {
			return report, errors.New("the log ends before the cursor")
		}
		after = next
	}
	return report, nil
}

// applyAnew applies events to tables that replace the projection together, as the projection does, and to tables for a
// comparison one by one, because the result must not depend on which events were in one batch. It returns how many
// events cannot be applied; these are left out.
func (a applier) applyAnew(ctx context.Context, tx pgx.Tx, records []events.Record, together bool) (int, error) {
	if len(records) == 0 {
		return 0, nil
	}
	err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
		if together {
			return a.applyAll(ctx, sp, records)
		}
		for _, r := range records {
			if err := a.apply(ctx, sp, r); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		return 0, nil
	}
	unapplied := 0
	for _, r := range records {
		err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error { return a.apply(ctx, sp, r) })
		if err != nil && !events.Poisonous(ctx, err) {
			return 0, fmt.Errorf("event at %d: %w", r.Pos, err)
		}
		if err != nil {
			unapplied++
		}
	}
	if unapplied == 0 {
		return 0, fmt.Errorf("events from %d to %d, of which each can be applied by itself: %w", records[0].Pos,
			records[len(records)-1].Pos, err)
	}
	return unapplied, nil
}

// compareTables compares a table with its rebuild.
var compareTables = pg.DefineDynamic(pg.RoleReadmodel, "project.compare", func(t target) string {
	return fmt.Sprintf(`WITH missing AS (SELECT s.* FROM %[2]s s EXCEPT SELECT r.* FROM %[1]s r),
			surplus AS (SELECT r.* FROM %[1]s r EXCEPT SELECT s.* FROM %[2]s s)
		SELECT (SELECT count(*) FROM missing) AS missing, (SELECT count(*) FROM surplus) AS surplus,
			COALESCE((SELECT %[3]s FROM missing x LIMIT 1), (SELECT %[3]s FROM surplus x LIMIT 1), '') AS example`,
		t.table(), target{scratchPrefix, t.name}.table(), spelledKey(t.name))
}, targets("")...)

// spelledKey returns the SQL expression for the key of a row, as x.
func spelledKey(name string) string {
	return "concat_ws('/', x." + strings.Join(tables[name].key, "::text, x.") + "::text)"
}

// compare counts the rows that one of the two tables has and the other has not; after a cut, only among the rows that
// the events name.
func compare(ctx context.Context, tx pgx.Tx, name string, cut bool) (Difference, error) {
	statement := compareTables
	if cut {
		statement = compareReported
	}
	d, err := pg.One[Difference](ctx, tx, statement.For(target{"", name}))
	if err != nil {
		return d, fmt.Errorf("compare %s: %w", name, err)
	}
	d.Table = name
	return d, nil
}
