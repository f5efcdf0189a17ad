// Package lock asks Redis whether a run of a workspace is already under way, so that many requests for one workspace
// are answered quickly.
//
// It owns the key gpuaas:ws:<id>:op and nothing else. It uses a value only if it is an id, and an answer only if it
// came within the budget. It decides nothing: Postgres does, by its unique index and the run's fence. A caller that
// gets Won still inserts the run, and a caller that gets Held still reads that run by its primary key; on Unknown the
// caller queries Postgres directly.
//
// Guarantees: no call takes longer than the budget by more than scheduling; after a failure or a slow answer no call
// goes to Redis for a while, and Acquire returns Unknown at once; a lock of another run is never released.
// No caller may rely on a lock until its expiry: Redis may lose it sooner.
package lock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/obs"
)

// Defaults of Config.
const (
	DefaultTTL         = 30 * time.Second
	DefaultBudget      = 50 * time.Millisecond
	DefaultCooldown    = time.Second
	DefaultMaxCooldown = 10 * time.Second
)

// Kind is the result in an Outcome.
type Kind int

// The kinds. The zero value is Unknown, so that an Outcome that was not set sends the caller to Postgres.
const (
	Unknown Kind = iota // no answer from Redis: query Postgres
	Won                 // no run had the lock: insert the run, Postgres confirms
	Held                // RunID has the lock, according to Redis: confirm by primary key, then join
)

func (k Kind) String() string {
	switch k {
	case Won:
		return "won"
	case Held:
		return "held"
	case Unknown:
		return "unknown"
	default:
		return "unknown"
	}
}

// Outcome is the result of Acquire.
type Outcome struct {
	Kind  Kind
	RunID string // of the holder, for Held
}

// Config holds the expiry of locks and the time limits for calls of Redis. Zero values mean the defaults.
type Config struct {
	TTL         time.Duration `yaml:"ttl"`
	Budget      time.Duration `yaml:"budget"`
	Cooldown    time.Duration `yaml:"cooldown"`     // the first pause after a failure; doubled at each failed try
	MaxCooldown time.Duration `yaml:"max_cooldown"` // the longest pause
}

var defaults = Config{
	TTL: DefaultTTL, Budget: DefaultBudget, Cooldown: DefaultCooldown, MaxCooldown: DefaultMaxCooldown,
}

// Deps is what a Lock needs. Client may be nil: Acquire then always returns Unknown. Metrics may be nil.
type Deps struct {
	Client  redis.UniversalClient
	Logger  *slog.Logger
	Metrics prometheus.Registerer
}

// Lock takes and releases the locks in Redis. Acquire of a nil *Lock returns Unknown.
type Lock struct {
	client   redis.UniversalClient
	config   Config
	breaker  *breaker
	outcomes *prometheus.CounterVec
}

// Dial returns a client for a redis:// or rediss:// address, set up so that no call outlives the budget: no retries,
// short dials. It connects lazily. Dial turns off the driver's own log on stderr for the whole process: the Lock logs
// what an operator needs.
func Dial(url string, cfg Config) (*redis.Client, error) {
	opts, err := redis.ParseURL(url)
	if err != nil {
		return nil, errors.New("lock store: the address is not a redis:// URL") // the error would carry the password
	}
	cfg = config.Or(cfg, defaults)
	opts.MaxRetries = -1
	opts.DialerRetries = 1
	opts.DialTimeout = cfg.Budget
	opts.ReadTimeout = cfg.Budget
	opts.WriteTimeout = cfg.Budget
	opts.PoolTimeout = cfg.Budget
	opts.ContextTimeoutEnabled = true
	opts.PoolSize = 16
	opts.DisableIdentity = true
	opts.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	redis.SetLogger(silent{})
	return redis.NewClient(opts), nil
}

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// New returns a Lock. It never dials.
func New(deps Deps, cfg Config) (*Lock, error) {
	if deps.Logger == nil {
		return nil, errors.New("lock: a logger is needed")
	}
	cfg = config.Or(cfg, defaults)
	cfg.MaxCooldown = max(cfg.MaxCooldown, cfg.Cooldown)
	l := &Lock{
		client: deps.Client, config: cfg,
		breaker: &breaker{logger: deps.Logger, least: cfg.Cooldown, most: cfg.MaxCooldown},
		outcomes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "lock_answers_total", Help: "Answers of the lock store by operation and outcome; unknown ones went " +
				"straight to Postgres.",
		}, []string{"operation", "outcome"}),
	}
	if deps.Metrics != nil {
		if err := deps.Metrics.Register(l.outcomes); err != nil {
			return nil, fmt.Errorf("lock: register metrics: %w", err)
		}
	}
	return l, nil
}

// Acquire tries to take the workspace's lock for a run. For the run that already has the lock it returns Won and keeps
// the first expiry.
func (l *Lock) Acquire(ctx context.Context, workspaceID, runID string) Outcome {
	if l == nil {
		return Outcome{}
	}
	out := l.acquire(ctx, workspaceID, runID)
	l.outcomes.WithLabelValues("acquire", out.Kind.String()).Inc()
	return out
}

func (l *Lock) acquire(ctx context.Context, workspaceID, runID string) Outcome {
	if !ids.Valid(workspaceID) || !ids.Valid(runID) {
		return Outcome{}
	}
	var holder string
	err := l.call(ctx, func(ctx context.Context) error {
		// One round trip: the read after the write returns the holder in either case.
		pipe := l.client.Pipeline()
		set := pipe.SetNX(ctx, key(workspaceID), runID, l.config.TTL)
		get := pipe.Get(ctx, key(workspaceID))
		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		if set.Err() != nil {
			return set.Err()
		}
		holder = get.Val()
		return nil
	})
	switch {
	case err != nil || !ids.Valid(holder):
		return Outcome{}
	case holder == runID:
		return Outcome{Kind: Won}
	default:
		return Outcome{Kind: Held, RunID: holder}
	}
}

const compareAndDelete = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`

// Release removes the lock if this run has it, and reports whether it did. Without an answer it returns false; the lock
// then ends at its expiry.
func (l *Lock) Release(ctx context.Context, workspaceID, runID string) bool {
	if l == nil {
		return false
	}
	outcome, done := "unknown", false
	if ids.Valid(workspaceID) && ids.Valid(runID) {
		err := l.call(ctx, func(ctx context.Context) error {
			n, err := l.client.Eval(ctx, compareAndDelete, []string{key(workspaceID)}, runID).Int()
			done = n == 1
			return err
		})
		switch {
		case err != nil:
			done = false
		case done:
			outcome = "done"
		default:
			outcome = "not_held"
		}
	}
	l.outcomes.WithLabelValues("release", outcome).Inc()
	return done
}

// Check returns an error unless Redis answers within the budget, for a status page; a process is ready without it. It
// ignores the breaker. In a mesh without a lock store it returns obs.ErrOff.
func (l *Lock) Check(ctx context.Context) error {
	if l == nil || l.client == nil {
		return obs.ErrOff
	}
	ctx, cancel := context.WithTimeout(ctx, l.config.Budget)
	defer cancel()
	if err := l.client.Ping(ctx).Err(); err != nil {
		return fault.New(commonv1.Reason_REASON_UNAVAILABLE,
			"Redis does not answer within its budget; joins ask Postgres, which costs latency alone",
			fault.Remedy("look at the Redis that redis_url_file names, and start it again; nothing waits for it and nothing "+
				"in it is to be restored"),
			fault.Cause(err))
	}
	return nil
}

var errLeftAlone = errors.New("the lock store is left alone for a while")

// call runs fn within the budget unless the breaker is open, and passes the result to the breaker.
func (l *Lock) call(ctx context.Context, fn func(ctx context.Context) error) error {
	if l.client == nil || ctx.Err() != nil || !l.breaker.allow(time.Now()) {
		return errLeftAlone
	}
	callCtx, cancel := context.WithTimeout(ctx, l.config.Budget)
	defer cancel()
	err := fn(callCtx)
	switch {
	case err == nil:
		l.breaker.succeeded(ctx)
	case ctx.Err() != nil:
		// The caller gave up; whether Redis works is not known from that.
		l.breaker.undecided()
	case strings.HasPrefix(err.Error(), "WRONGTYPE"):
		// Another client wrote to our key. Redis works, but the value must not be used.
		l.breaker.succeeded(ctx)
	default:
		l.breaker.failed(ctx, time.Now(), err)
	}
	return err
}

func key(workspaceID string) string { return "gpuaas:ws:" + workspaceID + ":op" }
