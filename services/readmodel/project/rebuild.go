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

// Report is what a rebuild found.
type Report struct {
	Position    int64 // of the cursor
	Events      int64 // applied anew
	Parked      int   // left out, as the projection did
	Unapplied   int   // left out, for they cannot be applied: an event whose row a later one that came with it replaced is not looked at by the projection
	Differences []Difference
	Took        time.Duration
}

// Equal says whether projection and rebuild are the same.
func (r Report) Equal() bool { return len(r.Differences) == 0 }

// rebuildLock keeps rebuilds apart.
const rebuildLock = 0x72656275

// Verify makes a fresh projection from event 0 up to the cursor in scratch tables and compares it with the real one, in both directions. Everything
// happens in one snapshot that is rolled back: nothing changes, and the projection goes on meanwhile.
func (p *Projector) Verify(ctx context.Context) (Report, error) {
	began := time.Now()
	tx, err := p.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return Report{}, fmt.Errorf("verify projections: %w", err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // nothing is kept
	scratch := applier{sql: newStatements(scratchPrefix)}
	report, err := p.replay(ctx, tx, scratch, false)
	if err != nil {
		return Report{}, fmt.Errorf("verify projections: %w", err)
	}
	for _, name := range tableNames() {
		d, err := compare(ctx, tx, name)
		if err != nil {
			return Report{}, fmt.Errorf("verify projections: %w", err)
		}
		if d.Missing+d.Surplus > 0 {
			report.Differences = append(report.Differences, d)
		}
	}
	report.Took = time.Since(began)
	return report, nil
}

// Rebuild empties the projection and makes it anew up to the cursor, in one transaction: readers see the old one until then. The consumer waits
// meanwhile.
func (p *Projector) Rebuild(ctx context.Context) (Report, error) {
	began := time.Now()
	var report Report
	err := pg.InTx(ctx, p.db, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		report, err = p.replay(ctx, tx, p.applier, true)
		return err
	})
	if err != nil {
		return Report{}, fmt.Errorf("rebuild projections: %w", err)
	}
	p.advanced.Notify()
	report.Took = time.Since(began)
	return report, nil
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
	historyCut = pg.Define(pg.RoleReadmodel, "project.history_cut", `
	SELECT EXISTS (SELECT FROM mesh.retention r WHERE r.service = 'readmodel' AND r.total > 0)
		OR COALESCE((SELECT n.before > 0 FROM events.numbered n ORDER BY n.last_pos LIMIT 1), false)`)
	parkedPositions = pg.Define(pg.RoleReadmodel, "project.parked_positions", `
	SELECT pos FROM readmodel.parked_event WHERE consumer = $1 ORDER BY pos`)
)

// replay applies events 0 to the cursor. With replace it holds the cursor and empties the tables first.
func (p *Projector) replay(ctx context.Context, tx pgx.Tx, a applier, replace bool) (Report, error) {
	var report Report
	if _, err := pg.Exec(ctx, tx, keepRebuildsApart, rebuildLock); err != nil {
		return report, fmt.Errorf("keep other rebuilds away: %w", err)
	}
	cut, err := pg.Value[bool](ctx, tx, historyCut)
	if err != nil {
		return report, fmt.Errorf("ask whether history was cut: %w", err)
	}
	if cut {
		return report, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the log does not begin at its beginning any more: history was cut at the end of its term",
			fault.Unmet("events or projections have been cut, and the rest of the log does not make the projection"))
	}
	if report.Position, err = pg.Value[int64](ctx, tx, cursorPosition.For(replace), ConsumerName); err != nil && !pg.IsNoRows(err) {
		return report, fmt.Errorf("read cursor: %w", err)
	}
	if replace {
		for _, name := range tableNames() {
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
		unapplied, err := a.applyAnew(ctx, tx, records, replace)
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

// applyAnew applies events to tables that replace the projection as the projection does, and to tables that it is compared with one by one: what is written
// must not depend on which events came together. It returns how many events cannot be applied; these are left out.
func (a applier) applyAnew(ctx context.Context, tx pgx.Tx, records []events.Record, replace bool) (int, error) {
	if len(records) == 0 {
		return 0, nil
	}
	err := pgx.BeginFunc(ctx, tx, func(sp pgx.Tx) error {
		if replace {
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
		return 0, fmt.Errorf("events from %d to %d, of which each can be applied by itself: %w", records[0].Pos, records[len(records)-1].Pos, err)
	}
	return unapplied, nil
}

// compareTables compares a table with its rebuild.
var compareTables = pg.DefineDynamic(pg.RoleReadmodel, "project.compare", func(t target) string {
	key := "concat_ws('/', x." + strings.Join(tables[t.name].key, "::text, x.") + "::text)"
	return fmt.Sprintf(`WITH missing AS (SELECT s.* FROM %[2]s s EXCEPT SELECT r.* FROM %[1]s r),
			surplus AS (SELECT r.* FROM %[1]s r EXCEPT SELECT s.* FROM %[2]s s)
		SELECT (SELECT count(*) FROM missing) AS missing, (SELECT count(*) FROM surplus) AS surplus,
			COALESCE((SELECT %[3]s FROM missing x LIMIT 1), (SELECT %[3]s FROM surplus x LIMIT 1), '') AS example`,
		t.table(), target{scratchPrefix, t.name}.table(), key)
}, targets("")...)

// compare counts what one of the two tables has and the other has not.
func compare(ctx context.Context, tx pgx.Tx, name string) (Difference, error) {
	d, err := pg.One[Difference](ctx, tx, compareTables.For(target{"", name}))
	if err != nil {
		return d, fmt.Errorf("compare %s: %w", name, err)
	}
	d.Table = name
	return d, nil
}
