package retention

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

// batch is how many rows one transaction reads.
const batch = 500

// Every is how often a service walks unless its configuration says otherwise.
const Every = 10 * time.Minute

// Conns is how many connections a walk needs.
const Conns = 2

// timeout bounds a walk over all cuts; the next one goes on where each was stopped.
const timeout = 10 * time.Minute

// beforeAll is the id that a walk begins after.
const beforeAll = "00000000-0000-0000-0000-000000000000"

// Cut is one kind of rows that have a term.
type Cut struct {
	// Name is the name of the cut in the account, such as "tasks".
	Name string
	// Key is the policy key of its term.
	Key string
	// Statement cuts one batch: it takes the term in seconds, the id to go on after and how many rows to read, and returns
	// a Batch.
	Statement *pg.Statement
	// Oldest returns when the oldest remaining row was made; nil if that takes reading all rows.
	Oldest *pg.Statement
	// Elsewhere cuts one batch in another database than the walker's, in place of Statement: rows that ended before until,
	// no more of them than most. It returns how many it cut.
	Elsewhere func(ctx context.Context, until time.Time, most int) (int64, error)
}

// Batch is the result of one statement.
type Batch struct {
	Cut  int64   `db:"cut"`
	Next *string `db:"next"` // where to go on; nil at the end
}

// Table is a kind of rows that have a term, as a service lists its own.
type Table struct {
	// Name is the name of the cut, and of its function after "cut_".
	Name string
	Key  string
	// Schema is the schema of the function, if it is not the service's own.
	Schema string
	// Table and ID are the table, and its column that rises with time; empty where there is none.
	Table, ID string
}

// Of returns the cuts of tables. batch and oldest return the statements of one table.
func Of(tables []Table, batch, oldest func(Table) *pg.Statement) []Cut {
	cuts := make([]Cut, 0, len(tables))
	for _, t := range tables {
		c := Cut{Name: t.Name, Key: t.Key, Statement: batch(t)}
		if t.Table != "" {
			c.Oldest = oldest(t)
		}
		cuts = append(cuts, c)
	}
	return cuts
}

// Call returns the text of a Cut's Statement over the function of the service's schema, or of the Table's.
func (t Table) Call(schema string) string {
	if t.Schema != "" {
		schema = t.Schema
	}
	return `SELECT x.cut, x.next::text AS next FROM ` + schema + `.cut_` + t.Name +
		`(make_interval(secs => $1), $2::uuid, $3) x`
}

// Oldest returns the text of a Cut's Oldest over the table of a schema.
func (t Table) Oldest(schema string) string {
	if t.Table == "" {
		return `SELECT NULL::timestamptz WHERE false`
	}
	return `SELECT mesh.id_time(t.` + t.ID + `) FROM ` + schema + `.` + t.Table + ` t ORDER BY t.` + t.ID + ` LIMIT 1`
}

// Deps are the dependencies of a walker. DB logs in as the service.
type Deps struct {
	Logger     *slog.Logger
	DB         *pgxpool.Pool
	Policy     *policy.Source
	Registerer prometheus.Registerer
}

// Walker runs the cuts of a service.
type Walker struct {
	deps    Deps
	cuts    []Cut
	every   time.Duration // see Job
	rows    *prometheus.CounterVec
	success *prometheus.GaugeVec
}

// New makes a walker over cuts, which are walked in their order.
func New(deps Deps, cuts ...Cut) (*Walker, error) {
	w := &Walker{
		deps: deps, cuts: slices.Clone(cuts),
		rows: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "retention_rows_cut_total", Help: "Rows that were cut at the end of their term.",
		}, []string{"cut"}),
		success: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "retention_last_walk_timestamp_seconds",
			Help: "When a walk over the rows last came to its end on this replica.",
		}, []string{"cut"}),
	}
	for _, c := range cuts {
		if key, ok := policy.Lookup(c.Key); c.Name == "" || (c.Statement == nil) == (c.Elsewhere == nil) || !ok ||
			key.Kind != policy.Seconds {
			return nil, fmt.Errorf("build retention: cut %q has no name, not one way to cut, or no policy key of seconds",
				c.Name)
		}
		w.rows.WithLabelValues(c.Name)
	}
	if deps.Registerer != nil {
		if err := errors.Join(deps.Registerer.Register(w.rows), deps.Registerer.Register(w.success)); err != nil {
			return nil, fmt.Errorf("register metrics of retention: %w", err)
		}
	}
	return w, nil
}

// Job returns the walk as periodic work. It is called before the first walk.
func (w *Walker) Job(every time.Duration) background.Job {
	w.every = every
	return background.Job{Name: "retention", Every: every, Timeout: timeout, Run: w.Walk}
}

// Walk walks every cut once. A cut that fails does not stop the others.
func (w *Walker) Walk(ctx context.Context) error {
	var errs []error
	for _, c := range w.cuts {
		if err := w.walk(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("cut %s: %w", c.Name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	names := make([]string, 0, len(w.cuts))
	for _, c := range w.cuts {
		names = append(names, c.Name)
	}
	// A cut that was not walked for long belongs to no build or configuration that still runs.
	gone, err := pg.All[forgotten](ctx, w.deps.DB, forgetAccounts, names)
	if err != nil && ctx.Err() == nil {
		errs = append(errs, fmt.Errorf("forget cuts that are no more: %w", err))
	}
	for _, f := range gone {
		w.deps.Logger.WarnContext(ctx, "the account of a cut that no replica walks any more is forgotten",
			slog.String("cut", f.Cut), slog.Int64("rows", f.Total), slog.Time("last_walk", f.BeganAt))
	}
	return errors.Join(errs...)
}

// pause leaves the database to others between two batches: a walk is not urgent.
const pause = 20 * time.Millisecond

func (w *Walker) walk(ctx context.Context, c Cut) error {
	began, err := pg.One[beginning](ctx, w.deps.DB, readBeginning, c.Name)
	if err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	term := w.deps.Policy.Current().Duration(c.Key)
	var total int64
	var place *string // where the next walk goes on
	if c.Elsewhere == nil {
		total, place, err = w.batches(ctx, c, term, began.Place)
	} else {
		total, err = w.elsewhere(ctx, c, began.At.Add(-term))
	}
	w.rows.WithLabelValues(c.Name).Add(float64(total))
	failure := ""
	if err != nil {
		failure = obs.Redact(err.Error())
		if ctx.Err() == nil {
			place = nil // a failure at that place must not keep the rows before it from being cut
		} else {
			failure = "it was stopped, and goes on with the next walk"
		}
	} else {
		w.success.WithLabelValues(c.Name).SetToCurrentTime()
	}
	var oldest *time.Time
	ctx = context.WithoutCancel(ctx)
	if c.Oldest != nil {
		at, oldestErr := pg.Value[time.Time](ctx, w.deps.DB, c.Oldest)
		if oldestErr == nil {
			oldest = &at
		} else if !pg.IsNoRows(oldestErr) {
			err = errors.Join(err, fmt.Errorf("read the oldest row: %w", oldestErr))
		}
	}
	if _, keepErr := pg.Exec(ctx, w.deps.DB, keepAccount, c.Name, c.Key, total, began.At, oldest, failure, place,
		w.every); keepErr != nil {
		err = errors.Join(err, fmt.Errorf("write account: %w", keepErr))
	}
	if total > 0 {
		w.deps.Logger.DebugContext(ctx, "rows cut at the end of their term", slog.String("cut", c.Name),
			slog.Int64("rows", total))
	}
	return err
}

// batches walks from a place to the end, or until it is stopped. It returns how many rows it has cut, and the place
// that it has reached.
func (w *Walker) batches(ctx context.Context, c Cut, term time.Duration, place *string) (int64, *string, error) {
	total, after := int64(0), beforeAll
	if place != nil {
		after = *place
	}
	for {
		done, err := pg.One[Batch](ctx, w.deps.DB, c.Statement, term.Seconds(), after, batch)
		if err != nil {
			return total, &after, err
		}
		total += done.Cut
		if done.Next == nil {
			return total, nil, nil
		}
		after = *done.Next
		if !app.Sleep(ctx, pause) {
			return total, &after, ctx.Err()
		}
	}
}

// elsewhere cuts in another database, whose functions cannot read rollback mode: elsewhere reads it before each batch.
func (w *Walker) elsewhere(ctx context.Context, c Cut, until time.Time) (int64, error) {
	total := int64(0)
	for {
		rolledBack, err := pg.Value[bool](ctx, w.deps.DB, readRolledBack)
		if err != nil {
			return total, fmt.Errorf("read rollback mode: %w", err)
		}
		if rolledBack {
			return total, nil
		}
		n, err := c.Elsewhere(ctx, until, batch)
		total += n
		if err != nil || n < batch {
			return total, err
		}
		if !app.Sleep(ctx, pause) {
			return total, ctx.Err()
		}
	}
}
