package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/devstack/scratch"
	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/service"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/halt"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/mesh/person"
	"github.com/gpuaas/mesh/mesh/stores"
	"github.com/gpuaas/mesh/mesh/topology"
	"github.com/gpuaas/mesh/services/lifecycle"
)

const (
	// TrustDomain of a mesh of one's own.
	TrustDomain = "mesh.local"
	// Subject is the person of a mesh of one's own.
	Subject = "dev"
	// LogFile is the name of the log in the data directory. The command that runs the mesh writes it.
	LogFile = "dev.log"
	// agentsGrace is how long agents and instances may take to end by themselves.
	agentsGrace = 2 * time.Second
)

// Announcement describes how a client reaches the mesh.
type Announcement struct {
	Server      string // host:port
	TrustDomain string
	CAPEM       string
	Token       string
	Dir         string   // of the mesh's data; no other mesh has it
	Ephemeral   bool     // the directory is removed at the mesh's end
	People      []Person // one of each role, beside the mesh's own person, who has all roles but tenant
}

// Deps of a mesh.
type Deps struct {
	Logger *slog.Logger
	Out    io.Writer // where a person reads what has been started
	Err    io.Writer // where the ready line goes
	// Announce is called with the way to reach the mesh before anything is printed about it, and returns the name under
	// which clients find it.
	Announce func(context.Context, Announcement) (string, error)
	// Opened is called with the data directory before anything is written there; nil does nothing. The log of an ephemeral
	// mesh begins then.
	Opened func(dir string) error
	// Began is when the program began; zero means now.
	Began   time.Time
	Version string
}

// Mesh is a mesh that has been built.
type Mesh struct {
	deps      Deps
	cfg       completeConfig
	dir       string
	scratch   *scratch.Dir // nil unless ephemeral
	lock      *os.File
	material  *material.Material
	stores    *stores.Stores
	registry  *obs.Registry
	ops       *obs.OpsServer
	plan      topology.Plan
	numbering *service.Numbering // of all services
	services  []running
	instances *lifecycle.Service
	agents    []*agents.Agent
	person    *person.Client
	token     string
	context   string // of the client's file; empty if none was written
	people    []Person
	ready     chan struct{}
	took      time.Duration
}

// New brings the stores up and builds all services. The services listen; none runs before Run.
func New(ctx context.Context, deps Deps, cfg Config) (*Mesh, error) {
	if deps.Began.IsZero() {
		deps.Began = time.Now()
	}
	good, err := cfg.complete(agents.Find)
	if err != nil {
		return nil, err
	}
	m := &Mesh{deps: deps, cfg: good, ready: make(chan struct{})}
	if err := m.build(ctx); err != nil {
		stopCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return nil, errors.Join(err, m.release(stopCtx))
	}
	return m, nil
}

func (m *Mesh) build(ctx context.Context) error {
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"directory", m.takeDirectory},
		{"addresses", m.cfg.claim},
		{"material", m.makeMaterial},
		{"stores", m.startStores},
		{"policy", m.applyPolicy},
		{"person", m.admit},
		{"agents", m.furnish},
		{"services", m.buildServices},
	}
	for _, step := range steps {
		began := time.Now()
		if err := step.do(ctx); err != nil {
			return err
		}
		m.deps.Logger.DebugContext(ctx, "built", slog.String("part", step.name), slog.Duration("took", time.Since(began)))
	}
	return nil
}

func (m *Mesh) takeDirectory(ctx context.Context) error {
	halt.Sweep(ctx, m.deps.Logger)
	m.dir = m.cfg.DataDir
	if m.cfg.Ephemeral {
		var err error
		if m.scratch, err = scratch.Make(halt.Dev); err != nil {
			return err
		}
		m.dir = m.scratch.Path()
	}
	abs, err := filepath.Abs(m.dir)
	if err != nil {
		return fmt.Errorf("find data directory: %w", err)
	}
	m.dir = abs
	// Servers and workloads run as other users and traverse these directories; the mode of each file protects it.
	for _, dir := range []string{m.dir, m.agentsDir(), m.instanceDir()} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make data directory: %w", err)
		}
		if err := os.Chmod(dir, 0o711); err != nil {
			return fmt.Errorf("open data directory to traversal: %w", err)
		}
	}
	if m.lock, err = lockDir(m.dir); err != nil || m.deps.Opened == nil {
		return err
	}
	return m.deps.Opened(m.dir)
}

func (m *Mesh) agentsDir() string   { return filepath.Join(m.dir, "agents") }
func (m *Mesh) instanceDir() string { return filepath.Join(m.dir, "placement") }

// Dir returns the data directory.
func (m *Mesh) Dir() string { return m.dir }

// StatementsURL returns the connection string of the administrator to the mesh's database where our Postgres counts
// what each statement costs, or "".
func (m *Mesh) StatementsURL() string {
	if m.stores == nil || m.stores.Postgres == nil || !m.stores.Postgres.CountsStatements() {
		return ""
	}
	return m.stores.Postgres.AdminURLOf(pg.DatabaseMesh)
}

func (m *Mesh) makeMaterial(context.Context) error {
	var err error
	m.material, err = material.Make(material.Config{
		Dir: filepath.Join(m.dir, "material"), TrustDomain: TrustDomain,
		Hosts: m.cfg.hosts(),
	})
	return err
}

func (m *Mesh) startStores(ctx context.Context) error {
	cfg := stores.Config{
		Dir: filepath.Join(m.dir, "postgres"), RedisDir: filepath.Join(m.dir, "redis"),
		CacheDir: CacheDir(), DatabaseURL: m.cfg.DatabaseURL, RedisURL: m.cfg.RedisURL, Statements: m.cfg.Statements,
		IdleConns: m.cfg.IdleConns,
	}
	if m.scratch != nil {
		cfg.SocketDir = filepath.Join(m.dir, "socket") // it goes with the rest
	}
	var err error
	m.stores, err = stores.Start(ctx, m.deps.Logger, m.material, cfg)
	return err
}

// release releases everything that New opened, in the opposite order.
func (m *Mesh) release(ctx context.Context) error {
	var errs []error
	for _, s := range m.services {
		if s.close != nil {
			s.close()
		}
	}
	if m.numbering != nil {
		m.numbering.Close()
	}
	if m.ops != nil {
		errs = append(errs, m.ops.Close())
	}
	if m.person != nil {
		m.person.Close()
	}
	if m.stores != nil {
		errs = append(errs, m.stores.Stop(ctx))
	}
	if m.lock != nil {
		errs = append(errs, m.lock.Close())
	}
	if m.scratch != nil {
		errs = append(errs, m.scratch.Remove())
	}
	return errors.Join(errs...)
}

// Ready returns a channel that is closed when all services are ready and all agents are connected.
func (m *Mesh) Ready() <-chan struct{} { return m.ready }

// Client returns the connection of the mesh's person.
func (m *Mesh) Client() *person.Client { return m.person }

// Plan returns the addresses and paths of the mesh.
func (m *Mesh) Plan() topology.Plan { return m.plan }

// Registry returns the metrics of all services.
func (m *Mesh) Registry() *obs.Registry { return m.registry }

// Agents returns the node agents.
func (m *Mesh) Agents() []*agents.Agent { return m.agents }

// grace is how long the agents and what runs on launched instances may take to end; the instances have eight seconds of
// it. Mostly they need three, and more on a machine with other load.
const grace = 20 * time.Second

// Run runs the mesh until ctx ends, then ends everything that it started.
func (m *Mesh) Run(ctx context.Context) error {
	began := make(chan struct{})
	tasks := []app.Task{
		{Name: "stores", Phase: app.PhasePools, Run: m.stores.Keep},
		{Name: "certificates", Run: m.renew},
		{Name: "ops", Phase: app.PhasePools, Run: m.ops.Run},
		{Name: "numbering", Phase: app.PhasePools, Run: m.numbering.Run},
		{Name: "start", Run: func(ctx context.Context) error {
			if err := m.start(ctx, began); err != nil && ctx.Err() == nil {
				return err
			}
			<-ctx.Done()
			return nil
		}},
	}
	for _, s := range m.services {
		// Services that call others stop before those that they call, so that none logs the end of another as an error.
		phase := app.PhaseLoops
		if s.name == material.Recovery || s.name == material.Lifecycle {
			phase = app.PhaseLeases
		}
		tasks = append(tasks, app.Task{Name: s.name, Phase: phase, Run: s.Run})
	}
	for _, a := range m.agents {
		tasks = append(tasks, app.Task{
			Name: "agent " + a.Name(), Phase: app.PhaseDrain,
			Run: func(ctx context.Context) error {
				select {
				case <-began:
					return a.Run(ctx)
				case <-ctx.Done():
					return nil
				}
			},
		})
	}
	if m.instances != nil {
		tasks = append(tasks, app.Task{Name: "instances", Phase: app.PhaseDrain, Stop: m.instances.PowerOffInstances})
	}
	runErr := app.Group{Logger: m.deps.Logger, Grace: grace}.Run(ctx, tasks...)
	return errors.Join(runErr, m.end(context.WithoutCancel(ctx)))
}

// While runs the mesh, calls work once the mesh is ready, and ends it. If the mesh ends by itself, the context of work
// ends too.
func (m *Mesh) While(ctx context.Context, work func(ctx context.Context) error) error {
	running, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ended := make(chan error, 1)
	go func() {
		err := m.Run(running)
		stop(errors.Join(errors.New("the mesh ended by itself"), err))
		ended <- err
	}()
	var err error
	select {
	case <-m.Ready():
		err = work(running)
	case <-running.Done():
		err = fmt.Errorf("start the mesh: %w", context.Cause(running))
	}
	stop(nil)
	if last := <-ended; last != nil && err == nil {
		err = fmt.Errorf("end the mesh: %w", last)
	}
	return err
}

// end leaves no process behind: one that was launched during the stop is stopped too.
func (m *Mesh) end(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var errs []error
	if m.instances != nil {
		errs = append(errs, m.instances.PowerOffInstances(ctx))
	}
	_, err := agents.End(ctx, m.dir, 500*time.Millisecond)
	m.ops, m.services, m.numbering = nil, nil, nil // they have been run, and Run closes them
	return errors.Join(append(errs, err, m.release(ctx))...)
}

func (m *Mesh) renew(ctx context.Context) error {
	return app.Every(ctx, m.deps.Logger, "certificates", time.Hour, func(context.Context) error {
		_, err := m.material.Renew()
		return err
	})
}
