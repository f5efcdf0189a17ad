package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// byWatchdog is who releases the brake and closes incidents without a person.
const byWatchdog = "watchdog"

// Deps are the dependencies of a Fleet; Wake may be nil.
type Deps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	Pool       *pgxpool.Pool
	Policy     policy.Reader
	// Wake is notified after commits that appended events.
	Wake *events.Signal
}

// Config bounds the decisions; zero fields take the defaults. The settings for operators are policy keys.
type Config struct {
	BrakeWindow  time.Duration // in which affected units are counted; 5 min
	BrakeDwell   time.Duration // how long the cause must be gone before the brake is released automatically; 5 min
	ClassWindow  time.Duration // in which equal failures form one class; 1 h
	ClassQuiet   time.Duration // time without another failure after which a class is closed; 1 h
	ClassTenants int           // tenants that make a class; 3
	ClassPair    int           // workspaces of two tenants that make one; 5
}

var defaults = Config{
	BrakeWindow: 5 * time.Minute, BrakeDwell: 5 * time.Minute, ClassWindow: time.Hour, ClassQuiet: time.Hour,
	ClassTenants: 3, ClassPair: 5,
}

// Fleet decides about the fleet as a whole. Each replica has one; the rounds are those of its watchdog.
type Fleet struct {
	deps   Deps
	cfg    Config
	gauges *gauges
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps, cfg Config) (*Fleet, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Policy == nil {
		return nil, errors.New("fleet needs a logger, a pool and the policy")
	}
	f := &Fleet{deps: deps, cfg: config.Or(cfg, defaults)}
	var err error
	if f.gauges, err = newGauges(deps.Registerer); err != nil {
		return nil, err
	}
	return f, nil
}

// Round is what one round of the watchdog decides about the fleet, in its transaction.
type Round struct {
	fleet     *Fleet
	tx        pgx.Tx
	now       time.Time
	brake     *brake
	locked    bool             // the brake's row is locked
	fraction  float64          // of the fleet that may fail at once
	limits    wave.Limits      // of nodes whose records are missing
	instances map[string]int32 // of each placement; nil until Units has counted them
	units     int32            // of the fleet, counted with them
}

// Begin reads the brake under a lock that excludes other rounds until the transaction ends. With lock it locks the
// brake's row as well, which a round must do that writes or requests anything.
func (f *Fleet) Begin(ctx context.Context, tx pgx.Tx, now time.Time, lock bool) (*Round, error) {
	b, err := readBrake(ctx, tx, lock)
	if err != nil {
		return nil, err
	}
	return &Round{
		fleet: f, tx: tx, now: now, brake: b, locked: lock, fraction: f.deps.Policy.Current().BrakeFleetFraction(),
		limits: wave.LimitsOf(f.deps.Policy),
	}, nil
}

// ErrUnlocked ends a round that has something to write or to request without having locked the brake's row.
var ErrUnlocked = errors.New("the brake's row is not locked")

// Writes must be called before a round writes or requests anything, except for the deletions of what is forgotten. It
// returns ErrUnlocked if the round has to begin again with the brake's row locked.
func (r *Round) Writes() error {
	if !r.locked {
		return ErrUnlocked
	}
	return nil
}

// Engaged reports whether the brake is engaged.
func (r *Round) Engaged() bool { return r.brake.Engaged }

// Fraction returns the fraction of the fleet that may fail at once.
func (r *Round) Fraction() float64 { return r.fraction }

var readClock = pg.Define(pg.RoleRecovery, "fleet.read_clock", `SELECT mesh.clock()`)

// Clock returns the database's time, by which all decisions are made.
func Clock(ctx context.Context, q pg.Querier) (time.Time, error) {
	now, err := pg.Value[time.Time](ctx, q, readClock)
	if err != nil {
		return now, fmt.Errorf("read clock: %w", err)
	}
	return now, nil
}
