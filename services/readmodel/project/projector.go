package project

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

// ConsumerName is the name of the projections' cursor.
const ConsumerName = "projections"

// eventsTogether is how many events are applied together if many wait. With more of them, more rows are superseded
// before they are written.
const eventsTogether = 1000

// Deps of a projector. Numbered and Wake are the process's own.
type Deps struct {
	Logger         *slog.Logger
	DB             *pgxpool.Pool // logs in as readmodel
	Numbered, Wake *events.Signal
	Registerer     prometheus.Registerer
}

// Projector applies events to the tables.
type Projector struct {
	db         *pgxpool.Pool
	logger     *slog.Logger
	consumer   *events.Consumer
	applier    applier
	advanced   events.Signal
	queued     events.Signal
	wake       *events.Signal
	unnotified atomic.Bool // an event for watchers was appended, and the sequencer was not notified of it yet
	metrics    metrics
}

type metrics struct {
	applied, parked prometheus.Counter
	behind, waiting prometheus.Gauge
	parkedNow       prometheus.Gauge
}

// New returns a projector. It does not access the database.
func New(deps Deps) (*Projector, error) {
	live := applier{sql: newStatements(""), queues: true}
	p := &Projector{db: deps.DB, logger: deps.Logger, wake: deps.Wake, applier: live, metrics: metrics{
		applied: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "projection_events_total",
			Help: "Events that took effect in the projections.",
		}),
		parked: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "projection_events_parked_total",
			Help: "Events that could not be projected and were passed over.",
		}),
		behind: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "projection_events_behind",
			Help: "Events that wait to be projected.",
		}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "projection_lag_seconds",
			Help: "Age of the oldest event that is not projected.",
		}),
		parkedNow: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "projection_events_parked",
			Help: "Parked events that have not been replayed.",
		}),
	}}
	var errs []error
	for _, c := range []prometheus.Collector{
		p.metrics.applied, p.metrics.parked, p.metrics.behind, p.metrics.waiting,
		p.metrics.parkedNow,
	} {
		if deps.Registerer != nil {
			errs = append(errs, deps.Registerer.Register(c))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("register metrics of projections: %w", err)
	}
	var err error
	p.consumer, err = events.NewConsumer(events.ConsumerDeps{
		Pool: deps.DB, Numbered: deps.Numbered, Wake: deps.Wake, Logger: deps.Logger,
		Committed: func(records []events.Record) {
			p.metrics.applied.Add(float64(len(records)))
			p.advanced.Notify()
			if dueOf(records).any() {
				p.queued.Notify()
			}
			if p.unnotified.Swap(false) {
				p.wake.Notify()
			}
		},
		Replayed: func(ctx context.Context, tx pgx.Tx, r events.Record) error {
			p.unnotified.Store(true)
			return notifyWatchers(ctx, tx, KindReplayed, r.Pos)
		},
		Parked:   func(events.Record, error) { p.metrics.parked.Inc() },
		Together: p.applier.applyAll,
	}, events.ConsumerConfig{
		Name: ConsumerName, Schema: "readmodel", Kinds: Kinds(), Batch: eventsTogether,
		AsyncCommit: true,
	})
	if err != nil {
		return nil, fmt.Errorf("build projections' consumer: %w", err)
	}
	return p, nil
}

// Run applies events until ctx ends.
func (p *Projector) Run(ctx context.Context) error {
	return p.consumer.Run(ctx, p.applier.apply)
}

// measureEvery is how often a replica measures its lag for the metrics.
const measureEvery = 15 * time.Second

// Measure updates the gauges of lag until ctx ends.
func (p *Projector) Measure(ctx context.Context) error {
	return app.Every(ctx, p.logger, "projection-lag", measureEvery, func(ctx context.Context) error {
		lag, err := p.Lag(ctx)
		if err != nil {
			return err
		}
		p.metrics.behind.Set(float64(lag.Events + lag.Unnumbered))
		p.metrics.waiting.Set(lag.Oldest.Seconds())
		p.metrics.parkedNow.Set(float64(lag.Parked))
		return nil
	})
}

// Drain applies everything that is numbered, for tests and tools.
func (p *Projector) Drain(ctx context.Context) error {
	return p.consumer.Drain(ctx, p.applier.apply)
}

// Advanced returns a channel that fires after this process has committed projected events.
func (p *Projector) Advanced() <-chan struct{} { return p.advanced.C() }

// Queued returns a channel that fires after this process has queued nodes or workspaces that may be touched.
func (p *Projector) Queued() <-chan struct{} { return p.queued.C() }

// WaitFor waits until a command's position token is projected, at most two seconds. A token of another form is fault
// invalid_argument; a position that was not reached in time is fault position_not_reached.
func (p *Projector) WaitFor(ctx context.Context, token string) error {
	return WaitFor(ctx, p.consumer, token)
}

var (
	// newestOfLate reads only the end of the log, because a backward scan of the whole log opens every partition.
	newestOfLate = pg.Define(pg.RoleReadmodel, "project.newest_of_late_events", `
	SELECT e.seq FROM events.event e
	WHERE e.seq > (SELECT n.highest FROM events.numbered n ORDER BY n.last_pos DESC LIMIT 1) - 10000 AND e.kind = ANY($1)
	ORDER BY e.seq DESC LIMIT 1`)
	newestEvent = pg.Define(pg.RoleReadmodel, "project.newest_event",
		`SELECT seq FROM events.event WHERE kind = ANY($1) ORDER BY seq DESC LIMIT 1`)
	readPosition = pg.Define(pg.RoleReadmodel, "project.position",
		`SELECT COALESCE((SELECT pos FROM readmodel.event_cursor WHERE name = $1), 0)`)
)

// CatchUp waits until all events that are committed now are projected, at most two seconds; it returns no error if that
// takes longer. It is for a lookup that found nothing: the object may be newer than the projection.
func (p *Projector) CatchUp(ctx context.Context) error {
	seq, err := pg.Value[int64](ctx, p.db, newestOfLate, Kinds())
	if pg.IsNoRows(err) { // no event of these kinds among the last 10000
		seq, err = pg.Value[int64](ctx, p.db, newestEvent, Kinds())
	}
	if pg.IsNoRows(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the newest event: %w", err)
	}
	if err := p.consumer.WaitForSeq(ctx, seq); err != nil && !errors.Is(err, events.ErrBehind) {
		return fmt.Errorf("wait for the newest event: %w", err)
	}
	return nil
}

// Lag returns how far the projection is behind the log.
func (p *Projector) Lag(ctx context.Context) (events.Lag, error) {
	return p.consumer.Lag(ctx)
}

// Blockers returns the database sessions that the sequencers wait for, as `role (pid n)`.
func (p *Projector) Blockers(ctx context.Context) ([]string, error) {
	return events.Blockers(ctx, p.db)
}

// Parked returns the events that could not be applied and were skipped.
func (p *Projector) Parked(ctx context.Context) ([]events.ParkedEvent, error) {
	return p.consumer.Parked(ctx)
}

// Replay applies one parked event.
func (p *Projector) Replay(ctx context.Context, pos int64) error {
	return p.consumer.Replay(ctx, pos, p.applier.apply)
}

// Position returns the position of the cursor, which all replicas share.
func Position(ctx context.Context, q pg.Querier) (int64, error) {
	pos, err := pg.Value[int64](ctx, q, readPosition, ConsumerName)
	if err != nil {
		return 0, fmt.Errorf("read position of projections: %w", err)
	}
	return pos, nil
}

// WaitFor waits until a consumer reaches a position token. It returns a fault if the consumer does not reach it in
// time.
func WaitFor(ctx context.Context, c *events.Consumer, token string) error {
	err := c.WaitFor(ctx, token)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, events.ErrUnknownPosition):
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "min_pos is not a position that a command answered",
			fault.Unmet("min_pos: unknown position"), fault.Cause(err))
	case errors.Is(err, events.ErrBehind):
		return fault.New(commonv1.Reason_REASON_POSITION_NOT_REACHED, "", fault.RetryAfter(500*time.Millisecond),
			fault.Cause(err))
	default:
		return fmt.Errorf("wait for min_pos: %w", err)
	}
}
