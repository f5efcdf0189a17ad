package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// Base is the common part of a running service.
type Base struct {
	Name      string
	ReplicaID string
	Config    Config
	Logger    *slog.Logger
	Registry  *obs.Registry
	Health    *obs.Health
	DB        *pgxpool.Pool
	Store     *pki.Store
	Services  *pki.Bundle // roots of the services' issuer
	Policy    *policy.Source
	Audit     *audit.Log

	// Wake, Numbered and Settings are the signals of Numbering.
	Wake, Numbered, Settings *events.Signal

	// OnIssuers is called with the roots of services, before OpenKeys returns and after each change. It is set before
	// OpenKeys is called. It may be nil.
	OnIssuers func(links []pki.RootLink)

	settings   map[string]string
	exhaustion pg.Exhaustion
	numbering  *Numbering
	shared     bool            // numbering is the process's: it is run and closed there
	pools      []*pgxpool.Pool // beside DB
	ops        *obs.OpsServer
	clients    []*http.Client
	tasks      []app.Task
	reload     []pki.Reloader
	consumers  []string
}

// Consumes notes that this replica runs a consumer of events, by the name of its cursor: once a person has removed a
// consumer that no live replica runs, no events are kept for it. It is called before the tasks run.
func (b *Base) Consumes(names ...string) { b.consumers = append(b.consumers, names...) }

// PartDatabaseRoom is the part of a service's health that reports whether the database has disk, memory and connections
// left for it.
const PartDatabaseRoom = "database_room"

// Option changes how the common part is built.
type Option func(*Base)

// WithPoolSettings sets run-time parameters of the database for every connection of the service's own pool.
func WithPoolSettings(settings map[string]string) Option {
	return func(b *Base) { b.settings = settings }
}

// WithNumbering lets a service share the numbering of its process, which runs it until all its services have ended.
// Nil: the service has one of its own.
func WithNumbering(n *Numbering) Option {
	return func(b *Base) { b.numbering, b.shared = n, n != nil }
}

// New builds the common part. Close it if Run is never called.
func New(ctx context.Context, logger *slog.Logger, registry *obs.Registry, name string, cfg Config,
	opts ...Option,
) (*Base, error) {
	if cfg.Service != "" && cfg.Service != name {
		return nil, fmt.Errorf("build %s: this is the configuration of %s", name, cfg.Service)
	}
	aside.Log(logger)
	offset, err := wallclock.Offset()
	if err != nil {
		return nil, fmt.Errorf("build %s: %w", name, err)
	}
	if offset != 0 {
		logger.WarnContext(ctx, "the clock of this process is not its host's", slog.String(obs.KeyService, name),
			slog.Duration("offset", offset))
	}
	b := &Base{
		Name: name, ReplicaID: cfg.ReplicaID, Config: cfg, Registry: registry, Health: obs.NewHealth(),
		Logger: logger.With(slog.String(obs.KeyService, name)),
	}
	if b.ReplicaID == "" {
		b.ReplicaID = ids.New()
	}
	for _, opt := range opts {
		opt(b)
	}
	if err := b.open(ctx); err != nil {
		b.Close()
		return nil, fmt.Errorf("build %s: %w", name, err)
	}
	return b, nil
}

// Pool opens a further pool of the service's own role, with the server's own planner: for work whose statements read
// many rows, beside the short ones that WithPoolSettings is for. It is closed with the service.
func (b *Base) Pool(ctx context.Context, purpose string, conns int32) (*pgxpool.Pool, error) {
	url, err := b.Config.DatabaseURLFile.Read()
	if err != nil {
		return nil, fmt.Errorf("read database url: %w", err)
	}
	pool, err := pg.Open(ctx, pg.Config{
		URL: url.Reveal(), ApplicationName: "gpuaas-" + b.Name + "-" + purpose, MaxConns: conns, Exhaustion: &b.exhaustion,
	})
	if err != nil {
		return nil, fmt.Errorf("open database for %s: %w", purpose, err)
	}
	b.pools = append(b.pools, pool)
	return pool, nil
}

// Retention returns the periodic work that deletes rows of the service at the end of their retention. It has
// connections of its own: its statements read many rows.
func (b *Base) Retention(ctx context.Context, cuts ...retention.Cut) (background.Job, error) {
	pool, err := b.Pool(ctx, "retention", retention.Conns)
	if err != nil {
		return background.Job{}, err
	}
	walker, err := retention.New(retention.Deps{
		Logger: b.Logger, DB: pool, Policy: b.Policy,
		Registerer: b.Registry.ForService(b.Name),
	}, cuts...)
	if err != nil {
		return background.Job{}, err
	}
	return walker.Job(b.Config.RetentionSweep), nil
}

func (b *Base) open(ctx context.Context) error {
	url, err := b.Config.DatabaseURLFile.Read()
	if err != nil {
		return fmt.Errorf("read database url: %w", err)
	}
	if b.DB, err = pg.Open(ctx, pg.Config{
		URL: url.Reveal(), ApplicationName: "gpuaas-" + b.Name,
		MaxConns: b.Config.DatabaseConns, Settings: b.settings, Exhaustion: &b.exhaustion,
	}); err != nil {
		return fmt.Errorf("open database: %w", err)
	}
	if err := b.refuseSeeded(ctx); err != nil {
		return err
	}
	if b.numbering == nil {
		if b.numbering, err = NewNumbering(ctx, b.Logger, b.Name, b.Config.SequencerURLFile); err != nil {
			return err
		}
	}
	b.Wake, b.Numbered, b.Settings = b.numbering.Wake, b.numbering.Numbered, b.numbering.Settings
	if b.Store, err = pki.LoadStore(b.Config.TLS.CertFile, b.Config.TLS.KeyFile); err != nil {
		return fmt.Errorf("load certificate: %w", err)
	}
	if b.Services, err = pki.LoadBundle(b.Config.TLS.CAFile); err != nil {
		return fmt.Errorf("load services' issuer: %w", err)
	}
	b.Watch(b.Store, b.Services)
	b.Policy = policy.NewSource(policystore.Load(b.DB), b.Logger, policy.SourceConfig{Hints: settingsHints{b.Settings}})
	// The parts that are built now may take their settings from the policy. A database that is down leaves the defaults in
	// force until Run reads it.
	if err := b.Policy.Refresh(ctx); err != nil {
		b.Logger.WarnContext(ctx, "policy not read at the start", obs.Err(err))
	}
	b.Audit, err = audit.New(audit.Deps{Logger: b.Logger, Pool: b.DB, Schema: b.Name, Policy: b.Policy, Wake: b.Wake})
	if err != nil {
		return fmt.Errorf("build audit log: %w", err)
	}
	b.ops, err = obs.NewOpsServer(ctx,
		obs.OpsDeps{Logger: b.Logger, Registry: b.Registry, Health: b.Health, DebugSocket: b.Config.DebugSocket},
		b.Config.OpsListen)
	if err != nil {
		return fmt.Errorf("open ops port: %w", err)
	}
	b.Health.Ready("database", seldom(func() time.Duration { return pingPeriod(b.Numbered.Listening()) },
		func(ctx context.Context) error {
			if err := b.DB.Ping(ctx); err != nil {
				return errors.New("the database does not answer")
			}
			return nil
		}))
	// Exhaustion is reported, and the service stays ready: reads succeed.
	b.Health.Watch(PartDatabaseRoom, b.exhaustion.Check)
	b.addTasks()
	return nil
}

// pingPeriod returns how long the result of a ping of the database is valid. A connection that listens detects sooner
// that the server is gone, and is itself pinged every half minute.
func pingPeriod(listening bool) time.Duration {
	if listening {
		return 30 * time.Second
	}
	return 3 * time.Second
}

// settingsHints are the notifications that each change sends at its commit. They are missed only while the connection
// that listens for them is down, which is detected.
type settingsHints struct{ *events.Signal }

// Pace implements policy.Hints.
func (s settingsHints) Pace(ctx context.Context, now, wake <-chan struct{}, short time.Duration) bool {
	return s.PaceWithin(ctx, now, wake, short, keyset.QuietPoll)
}

// addTasks adds the loops of the common part.
func (b *Base) addTasks() {
	if !b.shared {
		b.Add(b.numbering.tasks()...)
	}
	b.Add(
		app.Task{Name: "policy", Run: b.Policy.Run},
		app.Task{Name: "audit", Phase: app.PhaseLeases, Run: b.Audit.Run},
		app.Task{Name: "health", Run: b.Health.Run},
		app.Task{Name: "ops", Phase: app.PhasePools, Run: b.ops.Run},
		app.Task{
			Name: "not-ready", Phase: app.PhaseNotReady,
			Stop: func(context.Context) error { b.Health.Drain("shutting down"); return nil },
		},
	)
}

// Add adds parts to be run.
func (b *Base) Add(tasks ...app.Task) { b.tasks = append(b.tasks, tasks...) }

// Watch reloads certificates and bundles when their files change.
func (b *Base) Watch(what ...pki.Reloader) { b.reload = append(b.reload, what...) }

// OpsAddr returns the address on which metrics and health are served.
func (b *Base) OpsAddr() string { return b.ops.Addr() }

// Room returns the fault of a database that refused something lately for want of disk, memory or connections; nil if it
// did not.
func (b *Base) Room(ctx context.Context) error { return b.exhaustion.Check(ctx) }

// Run runs all parts until ctx ends, then stops them in order and closes what New opened.
func (b *Base) Run(ctx context.Context) error {
	tasks := b.tasks
	if len(b.reload) > 0 {
		tasks = append(tasks, app.Task{Name: "certificates", Run: func(ctx context.Context) error {
			return pki.Watch(ctx, b.Logger, 2*time.Second, b.reload...)
		}})
	}
	defer b.Close()
	if err := app.Run(ctx, b.Logger, tasks...); err != nil {
		return fmt.Errorf("%s: %w", b.Name, err)
	}
	return nil
}

// Close closes pools and clients.
func (b *Base) Close() {
	for _, c := range b.clients {
		c.CloseIdleConnections()
	}
	for _, p := range append(b.pools, b.DB) {
		if p != nil {
			p.Close()
		}
	}
	if b.numbering != nil && !b.shared {
		b.numbering.Close()
	}
}
