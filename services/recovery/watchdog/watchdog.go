package watchdog

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/fleet"
)

// The requesters in requests to lifecycle: of what fails, and of what a machine came back without.
const (
	requesterWatchdog = "watchdog"
	requesterRecovery = "auto_recovery"
)

// requesterPrefixes begin our requesters as lifecycle stores them, which are followed by the service that made the
// request. Where a person's request names no requester, lifecycle stores the person's name alone, which has no colon.
var requesterPrefixes = []string{requesterWatchdog + ":", requesterRecovery + ":"}

// Lifecycle is the service that decides about workspaces.
type Lifecycle interface {
	RequestOperation(ctx context.Context, req *lifecyclev1.RequestOperationRequest) (*lifecyclev1.RequestOperationResponse,
		error)
}

// Deps are the dependencies of a Watchdog; the signals may be nil.
type Deps struct {
	Logger     *slog.Logger
	Registerer prometheus.Registerer // nil: metrics are kept and not exposed
	Pool       *pgxpool.Pool
	Lifecycle  Lifecycle
	Fleet      *fleet.Fleet
	Policy     policy.Reader
	// Wake is notified after commits that appended events; Numbered wakes the consumer.
	Wake, Numbered *events.Signal
	// Replica identifies this process as the holder of the lease; empty: an id is drawn.
	Replica string
}

// Config bounds the watchdog; zero fields take the defaults. The settings for operators are policy keys.
type Config struct {
	Every time.Duration // between rounds; 1 s, and three times that while nothing happens and Numbered listens
	Lease time.Duration // of the replica that acts; 15 s
	// FirstRequestAfter is the time from a detection to the first request, so that a failure of many is recognized as one;
	// 5 s.
	FirstRequestAfter time.Duration
	Timeout           time.Duration // of one request; 5 s
	RefusedFirst      time.Duration // the wait before a refused request is made again; 15 s, doubled each time
	RefusedMost       time.Duration // 5 min
	// RegisterFailures is how many refused registers make an instance count as unable to enrol; 3, as many as it has
	// mints.
	RegisterFailures int32
	RegisterFor      time.Duration // for how long registers must have been refused; 1 min
	Attempts         int32         // operations of one recovery; 3, after which the runbook treats the cause as permanent
	// PersonFor is how long a workspace that a person has taken over may stay failed before its recovery counts as
	// failed; 1 h.
	PersonFor time.Duration
	// how long facts of what has ended stay; 24 h, and those of finished runs 2 h at most
	ForgetAfter time.Duration
}

var defaults = Config{
	Every: time.Second, Lease: 15 * time.Second, FirstRequestAfter: 5 * time.Second, Timeout: 5 * time.Second,
	RefusedFirst: 15 * time.Second, RefusedMost: 5 * time.Minute, RegisterFailures: 3, RegisterFor: time.Minute,
	Attempts: 3, PersonFor: time.Hour, ForgetAfter: 24 * time.Hour,
}

// Watchdog of one replica. All replicas run one; the holder of the lease acts.
type Watchdog struct {
	deps     Deps
	cfg      Config
	consumer *events.Consumer
	metrics  *metrics
	forgot   time.Time
}

// New checks the dependencies; it does not touch the database.
func New(deps Deps, cfg Config) (*Watchdog, error) {
	if deps.Logger == nil || deps.Pool == nil || deps.Lifecycle == nil || deps.Fleet == nil || deps.Policy == nil {
		return nil, errors.New("watchdog needs a logger, a pool, lifecycle, the fleet and the policy")
	}
	if deps.Replica == "" {
		deps.Replica = ids.New()
	}
	w := &Watchdog{deps: deps, cfg: config.Or(cfg, defaults)}
	var err error
	if w.metrics, err = newMetrics(deps.Registerer); err != nil {
		return nil, err
	}
	w.consumer, err = events.NewConsumer(events.ConsumerDeps{
		Pool: deps.Pool, Numbered: deps.Numbered, Wake: deps.Wake, Logger: deps.Logger, Together: Together,
	}, events.ConsumerConfig{
		Name: ConsumerName, Schema: "recovery", Kinds: Kinds(), Gather: w.cfg.Every / 2, InOrder: true,
	})
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Consume applies events to the watchdog's tables until ctx ends.
func (w *Watchdog) Consume(ctx context.Context) error {
	return w.consumer.Run(ctx, Apply)
}

// Run makes rounds until ctx ends.
func (w *Watchdog) Run(ctx context.Context) error {
	return app.EveryPaced(ctx, w.deps.Logger, "watchdog", w.pause, func(ctx context.Context) error {
		_, err := w.RunOnce(ctx)
		return err
	})
}

// pause returns a function that sleeps between two rounds: one period if an event came, and a few if none did. Without
// an event a round can only find that something has been silent for too long, which takes ten seconds and more.
func (w *Watchdog) pause() func(context.Context) bool {
	wake := w.deps.Numbered.C()
	return func(ctx context.Context) bool {
		return w.deps.Numbered.PaceWithin(ctx, nil, wake, w.cfg.Every, 3*w.cfg.Every)
	}
}
