package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/common/v1/commonv1connect"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/background"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/policy/policystore"
	"github.com/gpuaas/mesh/internal/retention"
	"github.com/gpuaas/mesh/internal/rpc/assertion"
	"github.com/gpuaas/mesh/internal/rpc/calls"
	"github.com/gpuaas/mesh/internal/rpc/port"
)

// TLS locates the files of a service's own certificate.
type TLS struct {
	CertFile string `koanf:"cert_file"`
	KeyFile  string `koanf:"key_file"`
	CAFile   string `koanf:"ca_file"` // roots of the issuer of services, by which peers are verified
}

// Config is the part of a service's configuration that all share. Embed it.
type Config struct {
	// Service is the service that this file configures; empty: any service that reads it.
	Service          string            `koanf:"service"`
	Log              obs.LogConfig     `koanf:"log"`        // of a process of its own
	ReplicaID        string            `koanf:"replica_id"` // drawn at start if empty
	TrustDomain      string            `koanf:"trust_domain"`
	DatabaseURLFile  config.SecretFile `koanf:"database_url_file"`
	SequencerURLFile config.SecretFile `koanf:"sequencer_url_file"`
	DatabaseConns    int32             `koanf:"database_conns"`
	TLS              TLS               `koanf:"tls"`
	Listen           string            `koanf:"listen"`
	OpsListen        string            `koanf:"ops_listen"`
	DebugSocket      string            `koanf:"debug_socket"` // a unix socket for profiles; empty: none
	// RetentionSweep is the interval of the walks that delete rows at the end of their retention; nodeapi deletes none.
	RetentionSweep time.Duration `koanf:"retention_sweep"`
	// SeededDatabase allows a database whose fleet was loaded by a bench.
	SeededDatabase bool `koanf:"seeded_database"`
}

// Default returns the shared defaults.
func Default() Config {
	return Config{
		TrustDomain: "mesh.local", DatabaseConns: 16, Listen: "127.0.0.1:0", OpsListen: "127.0.0.1:0",
		RetentionSweep: retention.Every,
	}
}

// Validate returns an error that names everything that is missing.
func (c Config) Validate() error {
	var errs []error
	need := func(value, key string) {
		if value == "" {
			errs = append(errs, fmt.Errorf("%s is needed", key))
		}
	}
	need(c.TrustDomain, "trust_domain")
	need(string(c.DatabaseURLFile), "database_url_file")
	need(string(c.SequencerURLFile), "sequencer_url_file")
	need(c.TLS.CertFile, "tls.cert_file")
	need(c.TLS.KeyFile, "tls.key_file")
	need(c.TLS.CAFile, "tls.ca_file")
	need(c.OpsListen, "ops_listen")
	if c.ReplicaID != "" && !ids.Valid(c.ReplicaID) {
		errs = append(errs, errors.New("replica_id is not a UUID"))
	}
	if c.RetentionSweep < time.Second {
		errs = append(errs, errors.New("retention_sweep is shorter than a second"))
	}
	if c.DatabaseConns < 2 {
		errs = append(errs, errors.New("database_conns is below 2"))
	}
	return errors.Join(errs...)
}

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

// Self returns the service's own identity.
func (b *Base) Self() pki.ID { return pki.ServiceID(b.Config.TrustDomain, b.Name) }

// InternalServer makes the port that other services call, to be mounted on and run by the service.
func (b *Base) InternalServer(ctx context.Context, persons *assertion.Verifier) (*port.Server, error) {
	srv, err := port.New(ctx,
		port.Deps{Logger: b.Logger, Registerer: b.Registry.ForService(b.Name), Persons: persons, Translate: pg.Fault},
		port.Config{
			Name: "internal", Addr: b.Config.Listen,
			TLS: pki.ServerConfig{
				Store: b.Store, TrustDomain: b.Config.TrustDomain,
				Clients: []pki.Trust{{Kind: pki.KindService, Bundle: b.Services}},
			},
			MaxReadBytes: 8 << 20, // batches of many nodes' reports
		})
	if err != nil {
		return nil, fmt.Errorf("open internal port: %w", err)
	}
	if err := srv.Mount(commonv1connect.NewHealthServiceHandler(health{b}, srv.HandlerOptions()...)); err != nil {
		return nil, fmt.Errorf("mount health: %w", err)
	}
	b.Add(app.Task{Name: "internal", Phase: app.PhaseDrain, Run: srv.Run})
	return srv, nil
}

// health implements HealthService.
type health struct{ base *Base }

// GetHealth returns what this replica's own checks found last.
func (h health) GetHealth(context.Context, *commonv1.GetHealthRequest) (*commonv1.GetHealthResponse, error) {
	version, _ := obs.Build()
	return &commonv1.GetHealthResponse{
		Version: version, Service: h.base.Name, ReplicaId: h.base.ReplicaID, Draining: h.base.Health.Draining(),
		Parts: h.base.Health.Parts(),
	}, nil
}

// Client is a client of another service.
type Client struct {
	HTTP    *http.Client
	BaseURL string
	Options []connect.ClientOption
}

// Peer makes the client of another service, at host:port. asserter is for readmodel alone.
func (b *Base) Peer(name, addr string, asserter *assertion.Signer) (Client, error) {
	at, err := b.peers(name, asserter)
	if err != nil {
		return Client{}, err
	}
	return at(addr), nil
}

// Peers makes the clients of single replicas of another service, each for the given host:port. They share their
// connections.
func (b *Base) Peers(name string) (func(addr string) Client, error) { return b.peers(name, nil) }

func (b *Base) peers(name string, asserter *assertion.Signer) (func(addr string) Client, error) {
	cfg := pki.ClientConfig{Store: b.Store, Roots: b.Services, Server: pki.ServiceID(b.Config.TrustDomain, name)}
	hc, err := calls.HTTPClient(cfg, calls.HTTPConfig{})
	if err != nil {
		return nil, fmt.Errorf("client of %s: %w", name, err)
	}
	b.clients = append(b.clients, hc)
	opts := calls.Options(calls.Config{MaxReadBytes: 16 << 20, MaxSendBytes: 8 << 20, Asserter: asserter})
	return func(addr string) Client { return Client{HTTP: hc, BaseURL: "https://" + addr, Options: opts} }, nil
}

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

// Seldom returns a check that is not made again for the time after once it has succeeded. A check that fails is made at
// each call. No lock is taken during a check: callers that come meanwhile check as well, each for as long as its own
// context lives.
func Seldom(after time.Duration, check func(context.Context) error) func(context.Context) error {
	return seldom(func() time.Duration { return after }, check)
}

func seldom(after func() time.Duration, check func(context.Context) error) func(context.Context) error {
	var mu sync.Mutex
	var last time.Time // the beginning of the last check that succeeded
	return func(ctx context.Context) error {
		began := time.Now()
		mu.Lock()
		fresh := !last.IsZero() && began.Sub(last) < after()
		mu.Unlock()
		if fresh {
			return nil
		}
		if err := check(ctx); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if last.Before(began) {
			last = began
		}
		return nil
	}
}
