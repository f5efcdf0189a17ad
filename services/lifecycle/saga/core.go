package saga

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/events"
)

// Deps are the dependencies of the core.
type Deps struct {
	// DB logs in as the role lifecycle. Its sessions should have PoolSettings.
	DB       *pgxpool.Pool
	Registry *Registry
	Logger   *slog.Logger
	// Wakes is notified of what transactions make due. Every part that wakes runs of this core, or appends events for
	// them, shares it. Nil: one of the core's own, which wakes no sequencer.
	Wakes *Wakes
	// Stalls returns how long a step of a definition, or with an empty step a run of it, may show no progress by the
	// policy in force; zero leaves it to the definition. It is called each time, so that a new policy also applies to runs
	// that are live already. May be nil.
	Stalls func(definition, step string) time.Duration
	// PostponeDeadlines postpones the deadlines that other packages keep for runs which go on, and for their workspaces,
	// by the length of the pause. It is called in the transaction that resumes the runs. May be nil.
	PostponeDeadlines func(ctx context.Context, tx pgx.Tx, resumed []Resumed) error
	// LockDeadlines locks the rows that PostponeDeadlines is going to change and that come before runs in the order of
	// locks: the tasks of these runs. It is called in the same transaction, before the runs are locked. May be nil.
	LockDeadlines func(ctx context.Context, tx pgx.Tx, runIDs []string) error
	// Withdraw requests that agents stop the open tasks that a run's steps queued in the forward phase. It is called in
	// the transaction that cancels the run, before the run's row is locked. It must leave tasks of an undo alone: it is
	// called for a run that compensates already too. May be nil.
	Withdraw func(ctx context.Context, tx pgx.Tx, runID, reason string) error
	// OnPoint is called at every kill point besides the failpoint of that name; an error makes the driver drop the run
	// where it stands, as a crash would. For conformance tests; nil otherwise.
	OnPoint func(ctx context.Context, name string, at Place) error
}

// PoolSettings returns the session settings that suit the core's statements. These are long, and their best plan never
// depends on the values or on the sizes of tables: every row is found by an index. Planning them anew for each call
// would cost more than running them, and a plan made while the tables were empty would use sequential scans for as long
// as the connection lives.
func PoolSettings() map[string]string {
	return map[string]string{
		"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "enable_hashjoin": "off", "enable_mergejoin": "off",
		"enable_bitmapscan": "off",
	}
}

// Stats counts what the drivers of a core did since the core was made.
type Stats struct {
	Started, Leased, Advanced, Parked, Succeeded, Failed, Stuck atomic.Int64
	// Lost counts attempts that a lease closed as lost; FencedOut counts refused writes of a driver that had lost its
	// lease.
	Lost, FencedOut, Abandoned, Stalled, Quarantined, Paused, Resumed atomic.Int64
	// LeaseErrors and BeatErrors count lease rounds and heartbeats whose transaction failed.
	LeaseErrors, BeatErrors atomic.Int64
}

// Core reads and writes the rows of runs, attempts, claims and workspaces. Its methods with a tx run within the
// caller's transaction; the caller calls Committed after the commit.
type Core struct {
	*Wakes

	db            *pgxpool.Pool
	registry      *Registry
	log           *slog.Logger
	stalls        func(definition, step string) time.Duration
	postpone      func(ctx context.Context, tx pgx.Tx, resumed []Resumed) error
	lockDeadlines func(ctx context.Context, tx pgx.Tx, runIDs []string) error
	withdraw      func(ctx context.Context, tx pgx.Tx, runID, reason string) error
	onPoint       func(ctx context.Context, name string, at Place) error
	// notified fires when events of any replica were numbered; nil until FollowRemoteWakes runs
	notified atomic.Pointer[events.Signal]
	reserved uint64          // workers that runs which are being started have taken; under driving
	news     <-chan struct{} // closed by a notification since the check that resting is of; under driving
	resting  atomic.Bool     // no run was live when a driver of this process last checked
	stats    Stats

	driving sync.Mutex
	drivers []Driver // the drivers that run in this process
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps) (*Core, error) {
	if deps.DB == nil || deps.Registry == nil || deps.Logger == nil {
		return nil, errors.New("saga core needs a database, a registry and a logger")
	}
	wakes := deps.Wakes
	if wakes == nil {
		wakes = NewWakes(nil)
	}
	return &Core{
		Wakes: wakes, db: deps.DB, registry: deps.Registry, log: deps.Logger, stalls: deps.Stalls,
		onPoint: deps.OnPoint, postpone: deps.PostponeDeadlines, lockDeadlines: deps.LockDeadlines, withdraw: deps.Withdraw,
	}, nil
}

// DB returns the database of the core's rows.
func (c *Core) DB() *pgxpool.Pool { return c.db }

// Registry returns the definitions that this build can run.
func (c *Core) Registry() *Registry { return c.registry }

// Logger returns the logger of the core and its drivers.
func (c *Core) Logger() *slog.Logger { return c.log }

// Stats returns this core's counters.
func (c *Core) Stats() *Stats { return &c.stats }

// StallAfter returns how long a step may show no progress by the policy in force or its definition; without a step, how
// long a run may last.
func (c *Core) StallAfter(def *Definition, step *Step) time.Duration {
	name, after := "", def.StallAfter
	if step != nil {
		name, after = step.Name, step.StallAfter
	}
	if c.stalls != nil {
		if by := c.stalls(def.Name, name); by > 0 {
			return by
		}
	}
	return after
}

// FencedWrites returns the counter of the writes that the fences of runs refused.
func (c *Core) FencedWrites() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "saga_writes_fenced_total",
		Help: "Writes of a driver that had lost its lease on the run, refused by the run's fence.",
	}, func() float64 { return float64(c.stats.FencedOut.Load()) })
}
