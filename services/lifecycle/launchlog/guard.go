package launchlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
)

// Reporter is recovery, which owns rollback mode.
type Reporter interface {
	ReportRollback(context.Context, *recoveryv1.ReportRollbackRequest) (*recoveryv1.ReportRollbackResponse, error)
}

// Deps are the dependencies of a guard.
type Deps struct {
	Logger   *slog.Logger
	DB       *pgxpool.Pool
	Drivers  map[commonv1.PlacementDriver]placement.Driver // those that are placement.Logged are compared
	Recovery Reporter
}

// Guard compares the launch logs of this process's placements with the database.
type Guard struct {
	deps     Deps
	mu       sync.Mutex // one comparison at a time
	compared atomic.Bool
	// whole is when the whole log of a placement was compared last and nothing differed.
	whole map[commonv1.PlacementDriver]time.Time
}

// New returns a guard that has compared nothing yet.
func New(deps Deps) *Guard {
	return &Guard{deps: deps, whole: map[commonv1.PlacementDriver]time.Time{}}
}

// wholeEvery is the time between two comparisons of a whole log. Between them only what was written since the last
// comparison is compared: a database that is restored has an earlier position, and so compares what has come since.
const wholeEvery = 10 * time.Minute

// reportMost bounds the reports of one comparison: further ones would report the same of other workspaces.
const reportMost = 32

// Compared reports whether the last Check of this process returned nil: its comparison is done, and all its differences
// are reported to recovery. Nothing is launched before the first such Check, nor after one that failed until the next
// that does not. A nil Guard has nothing to compare.
func (g *Guard) Compared() bool { return g == nil || g.compared.Load() }

// Check compares every log once. It returns nil if all differences are reported and acknowledged, or accepted.
func (g *Guard) Check(ctx context.Context) error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var errs []error
	for _, kind := range slices.Sorted(maps.Keys(g.deps.Drivers)) {
		logged, ok := g.deps.Drivers[kind].(placement.Logged)
		if !ok {
			continue
		}
		if err := g.compare(ctx, kind, logged); err != nil {
			errs = append(errs, fmt.Errorf("compare launch log of %s with the database: %w", names.Of(kind), err))
		}
	}
	err := errors.Join(errs...)
	g.compared.Store(err == nil)
	return err
}

func (g *Guard) compare(ctx context.Context, kind commonv1.PlacementDriver, driver placement.Logged) error {
	// The confirmed instances and the last position are read before the log, because the log had them earlier: another
	// replica may compare a longer log meanwhile. The rows of the log's entries are read after the log, because they were
	// committed earlier.
	var live []liveRow
	var seen position
	err := pg.InTx(ctx, g.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if live, err = liveRows(ctx, tx, kind); err == nil {
			seen, err = g.seen(ctx, tx, kind)
		}
		return err
	})
	if err != nil {
		return err
	}
	log, err := driver.LaunchLog(ctx)
	if err != nil {
		return err
	}
	at, active, err := g.position(ctx, kind, log)
	if err != nil {
		return err
	}
	if at.reported && active {
		return nil // the differences are reported already, and remain until a person accepts them
	}
	era := at.present
	if !at.there {
		if era, err = pg.Era(ctx, g.deps.DB); err != nil {
			return err
		}
	}
	entries, whole := log.Entries, time.Since(g.whole[kind]) >= wholeEvery || at.era != era || active
	if last := at.since(seen); !whole && last.there && last.logID == log.ID {
		entries = writtenSince(entries, last.seq)
	}
	rows, err := rowStates(ctx, g.deps.DB, entries)
	if err != nil {
		return err
	}
	floor := floorOf(at, era)
	facts := append(aheadFacts(entries, rows, at.acceptedSeq, floor),
		behindFacts(kind, log, at.since(seen), live, floor)...)
	if len(facts) == 0 {
		if !at.covers(log, era) {
			if err := g.advance(ctx, kind, log); err != nil {
				return err
			}
		}
		if active || !at.there {
			return nil // the first comparison has not asked whether the mode is set
		}
		if !whole {
			return nil
		}
		if err := g.forget(ctx, kind, driver, over(entries, rows)); err != nil {
			// The comparison counts nevertheless; a later one compacts the log.
			g.deps.Logger.WarnContext(ctx, "launch log not compacted", slog.String("placement", names.Of(kind)), obs.Err(err))
			return nil
		}
		g.whole[kind] = time.Now()
		return nil
	}
	delete(g.whole, kind)
	still := false
	for _, f := range facts[:min(len(facts), reportMost)] {
		g.deps.Logger.WarnContext(ctx, "launch log and database are of different times",
			slog.String("kind", names.Of(f.Kind)), slog.String("subject", f.Subject), slog.String("detail", f.Detail),
			slog.Int64("remembered", f.Remembered), slog.Int64("known", f.Known),
			slog.String("placement", names.Of(kind)))
		res, err := g.deps.Recovery.ReportRollback(ctx, &recoveryv1.ReportRollbackRequest{
			Kind: f.Kind, Subject: f.Subject, Detail: f.Detail, Remembered: f.Remembered, Known: f.Known,
		})
		if err != nil {
			return fmt.Errorf("report to recovery: %w", err)
		}
		still = still || res.GetRollback().GetActive()
	}
	if still {
		return g.remember(ctx, kind, log)
	}
	// Recovery knows of the restore that explains the differences: they are accepted.
	g.deps.Logger.InfoContext(ctx, "differences between launch log and database are of a restore that is known",
		slog.String("placement", names.Of(kind)),
		slog.Int("differences", len(facts)))
	return g.accept(ctx, g.deps.DB, kind, log)
}

// seen reads the last line of the log when it was last compared; the zero position if it never was.
func (g *Guard) seen(ctx context.Context, q pg.Querier, kind commonv1.PlacementDriver) (position, error) {
	row, err := pg.One[seenRow](ctx, q, seenPosition, names.Of(kind))
	if pg.IsNoRows(err) {
		return position{}, nil
	}
	if err != nil {
		return position{}, fmt.Errorf("read how far the launch log was compared: %w", err)
	}
	return position{there: true, logID: row.LogID, seq: row.Seq}, nil
}

// position reads the position of the last comparison, and whether rollback mode is set. If differences were reported
// and the mode is over, it records them as accepted.
func (g *Guard) position(ctx context.Context, kind commonv1.PlacementDriver, log placement.LaunchLog) (position, bool,
	error,
) {
	var at position
	active := false
	err := pg.InTx(ctx, g.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		row, err := pg.One[positionRow](ctx, tx, lockPosition, names.Of(kind))
		if pg.IsNoRows(err) {
			at = position{}
			return nil
		}
		if err != nil {
			return fmt.Errorf("read position in launch log: %w", err)
		}
		active = row.Active
		at = position{
			there: true, logID: row.LogID, seq: row.Seq, era: row.Era, present: row.Present, reported: row.Reported,
			acceptedSeq: row.AcceptedSeq, acceptedAt: row.AcceptedAt,
		}
		if !at.reported || active {
			return nil
		}
		if err := g.accept(ctx, tx, kind, log); err != nil {
			return err
		}
		at.reported, at.logID, at.seq, at.acceptedSeq = false, log.ID, log.Seq, log.Seq
		accepted, err := pg.One[acceptedRow](ctx, tx, acceptedPosition, names.Of(kind))
		at.acceptedAt, at.era = accepted.AcceptedAt, accepted.Era
		return err
	})
	if err != nil {
		return position{}, false, fmt.Errorf("look at launch log: %w", err)
	}
	return at, active, nil
}

// accept records that all differences up to now are known.
func (g *Guard) accept(ctx context.Context, q pg.Querier, kind commonv1.PlacementDriver,
	log placement.LaunchLog,
) error {
	_, err := pg.Exec(ctx, q, acceptLog, names.Of(kind), log.ID, log.Seq)
	if err != nil {
		return fmt.Errorf("accept differences: %w", err)
	}
	return nil
}

// remember records that differences are reported to recovery. It leaves the stored position as it is, because later
// logs must not be compared with the one that differs.
func (g *Guard) remember(ctx context.Context, kind commonv1.PlacementDriver, log placement.LaunchLog) error {
	_, err := pg.Exec(ctx, g.deps.DB, rememberReport, names.Of(kind), log.ID, log.Seq)
	if err != nil {
		return fmt.Errorf("remember report: %w", err)
	}
	return nil
}

// advance records the log's last line, if it has grown.
func (g *Guard) advance(ctx context.Context, kind commonv1.PlacementDriver, log placement.LaunchLog) error {
	_, err := pg.Exec(ctx, g.deps.DB, advancePosition, names.Of(kind), log.ID, log.Seq)
	if err != nil {
		return fmt.Errorf("keep position in launch log: %w", err)
	}
	return nil
}

// forget makes the driver remove workspaces from its log that retention has deleted from the database.
func (g *Guard) forget(ctx context.Context, kind commonv1.PlacementDriver, driver placement.Logged,
	workspaces []string,
) error {
	if len(workspaces) == 0 {
		return nil
	}
	lines, err := driver.Forget(ctx, workspaces)
	if err != nil {
		return err
	}
	if lines > 0 {
		g.deps.Logger.InfoContext(ctx, "launch log compacted", slog.String("placement", names.Of(kind)),
			slog.Int("lines", lines))
	}
	return nil
}

// Await checks until the first comparison is done, or ctx ends.
func (g *Guard) Await(ctx context.Context, sleep func(context.Context) bool) {
	for !g.Compared() {
		err := g.Check(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		g.deps.Logger.WarnContext(ctx, "launch log not compared with the database yet, nothing is launched", obs.Err(err))
		if !sleep(ctx) {
			return
		}
	}
}
