package operation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/lock"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/task"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

const byProcess = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS

// cluster is lifecycle in several replicas over one database, with the fake world around it.
type cluster struct {
	t     *testing.T
	db    *testkit.Database
	world *world
	seats []*member

	workloadDB *pgxpool.Pool
}

// member is one replica: its own connections, server and driver of sagas.
type member struct {
	name   string // of its driver, and of its connections in Postgres
	pool   *pgxpool.Pool
	core   *saga.Core
	steps  *provision.Steps
	server *Server

	mu     sync.Mutex
	frozen chan struct{} // closed when the replica is thawed
}

type clusterConfig struct {
	seats     int
	lease     time.Duration
	joins     func(seat int) *lock.Lock
	instances func(w *world) placement.Driver // nil: the world itself
	workers   int
	release   time.Duration   // deadline of releases
	secrets   *secretenv.Keys // nil: a fresh key
	signing   *secretenv.Keys // of the replica that hands out tasks; nil: secrets
	tracer    pgx.QueryTracer // of the replicas' statements. May be nil
	// tracers makes the tracer of each replica's statements, in place of tracer. May be nil.
	tracers func(*member) pgx.QueryTracer
	grace   time.Duration // of each step of a forced one; zero: as long as a step waits before it checks again
}

// freeze blocks every statement of the replica to the database, as a pause of its process would, until the returned
// function is called.
func (s *member) freeze() func() {
	until := make(chan struct{})
	s.mu.Lock()
	s.frozen = until
	s.mu.Unlock()
	return sync.OnceFunc(func() { close(until) })
}

func (s *member) pass(ctx context.Context, _ *pgx.Conn) (bool, error) {
	s.mu.Lock()
	until := s.frozen
	s.mu.Unlock()
	if until == nil {
		return true, nil
	}
	select {
	case <-until:
		return true, nil
	case <-ctx.Done():
		return true, ctx.Err()
	}
}

func newCluster(t *testing.T, cfg clusterConfig) *cluster {
	t.Helper()
	testkit.IO(t)
	if cfg.secrets == nil {
		cfg.secrets = secretKeys(t, secretenv.NewKey())
	}
	if cfg.signing == nil {
		cfg.signing = cfg.secrets
	}
	p := &cluster{t: t, db: testkit.DB(t), world: newWorld()}
	p.world.replica = ids.New()
	p.beat(time.Hour)
	workloads, err := pg.Open(t.Context(), pg.Config{URL: p.db.WorkloadURL(), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(workloads.Close)
	p.workloadDB = workloads
	var instances placement.Driver = p.world
	if cfg.instances != nil {
		instances = cfg.instances(p.world)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var loops sync.WaitGroup
	t.Cleanup(func() {
		stop()
		loops.Wait()
		if err := counted(context.WithoutCancel(t.Context()), p.db.Pool(pg.RoleLifecycle)); err != nil {
			t.Errorf("the room of machines: %v", err)
		}
	})
	committed := func() {
		for _, s := range p.seats {
			s.core.Committed()
		}
	}
	for n := range cfg.seats {
		p.seats = append(p.seats, p.sit(n, cfg, workloads, instances, committed))
	}
	for _, s := range p.seats {
		driver, err := drive.New(s.core, drive.Config{
			Owner: s.name, Workers: max(cfg.workers, 8), Lease: cfg.lease, Heartbeat: cfg.lease / 4,
			Poll: 200 * time.Millisecond, CancelGrace: 2 * time.Second, StopGrace: 2 * time.Second, StallSweep: time.Second,
			MaxLosses: 100,
		})
		if err != nil {
			t.Fatal(err)
		}
		loops.Go(func() {
			if err := driver.Run(ctx); err != nil {
				t.Errorf("driver: %v", err)
			}
		})
	}
	loops.Go(func() { p.world.play(ctx) })
	return p
}

func (p *cluster) sit(n int, cfg clusterConfig, workloads *pgxpool.Pool, instances placement.Driver,
	committed func(),
) *member {
	p.t.Helper()
	s := &member{name: fmt.Sprintf("seat-%d", n)}
	pc, err := pgxpool.ParseConfig(p.db.URL(pg.RoleLifecycle))
	if err != nil {
		p.t.Fatal(err)
	}
	pc.MaxConns, pc.PrepareConn = 10, s.pass
	pc.ConnConfig.Tracer = cfg.tracer
	if cfg.tracers != nil {
		pc.ConnConfig.Tracer = cfg.tracers(s)
	}
	pc.ConnConfig.RuntimeParams["timezone"], pc.ConnConfig.RuntimeParams["application_name"] = "UTC", s.name
	pc.ConnConfig.RuntimeParams[pg.WriterSetting] = pg.WriterProduct
	maps.Copy(pc.ConnConfig.RuntimeParams, saga.PoolSettings())
	if s.pool, err = pgxpool.NewWithConfig(p.t.Context(), pc); err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(s.pool.Close)
	log := testkit.Logger(p.t)
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: log, DB: s.pool, Key: fakeAgentKey, Hub: dispatch.NewHub(log, s.pool, nil), Committed: committed,
		Wake:    func(ctx context.Context, tx pgx.Tx, runs ...string) error { return s.core.Wake(ctx, tx, runs...) },
		Secrets: cfg.secrets,
	})
	s.steps = provision.NewSteps(provision.StepDeps{
		ReleaseDeadline: cfg.release, ForceGrace: cmp.Or(cfg.grace, 5*time.Second),
		Logger: log, DB: s.pool, Workloads: workloads, Committed: func() { s.core.Committed() }, Tasks: tasks,
		Identities: p.world, Secret: make([]byte, 32),
		Secrets:   cfg.secrets,
		Catalogue: catalogue(), Drivers: map[commonv1.PlacementDriver]placement.Driver{
			commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS: instances,
			commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC:  static.New(s.pool),
		},
	})
	reg, err := s.steps.Registry()
	if err != nil {
		p.t.Fatal(err)
	}
	if s.core, err = saga.New(saga.Deps{
		DB: s.pool, Registry: reg, Logger: log, PostponeDeadlines: s.steps.PostponeDeadlines,
		LockDeadlines: task.LockOfRuns, Withdraw: tasks.Withdraw,
	}); err != nil {
		p.t.Fatal(err)
	}
	var joins *lock.Lock
	if cfg.joins != nil {
		joins = cfg.joins(n)
	}
	s.server = NewServer(Deps{
		Logger: log, DB: s.pool, Core: s.core, Catalogue: catalogue(), Lock: joins,
		Policy:       policy.Fixed{Set: policy.Defaults()},
		DefaultQuota: tenants.Quota{Workspaces: 1000, GPUs: 1000, StorageBytes: 1 << 50},
		Secrets:      cfg.secrets,
	})
	if n == 0 {
		// The agents use a replica that is never frozen, as agents reach the database through nodeapi and not through
		// lifecycle.
		pool := p.db.Pool(pg.RoleLifecycle)
		p.world.tasks = dispatch.NewServer(dispatch.Deps{
			Logger: log, DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(log, pool, nil), Committed: committed,
			Wake:    func(ctx context.Context, tx pgx.Tx, runs ...string) error { return s.core.Wake(ctx, tx, runs...) },
			Secrets: cfg.signing,
		})
		p.world.gates = gate.NewServer(gate.Deps{
			Logger: log, DB: pool, Join: anyJoin{}, Tasks: p.world.tasks,
			Instances: allocation.Registrations{Wakes: s.core.Wakes}, Committed: committed, Slots: 4,
		})
	}
	return s
}

// beat makes the agents' replica count as alive until then, by the database's clock; with a negative time it counts as
// dead.
func (p *cluster) beat(until time.Duration) {
	p.t.Helper()
	if _, err := p.db.OwnerPool().Exec(p.t.Context(), `DELETE FROM mesh.replica`); err != nil {
		p.t.Fatal(err)
	}
	testkit.Beat(p.db, p.world.replica, "nodeapi.example:7443", until, false)
}

// machine enrols a shared machine, whose agent connects.
func (p *cluster) machine(name string) string {
	p.t.Helper()
	node := ids.New()
	_, err := p.world.gates.ApplyFence(p.t.Context(),
		&lifecyclev1.ApplyFenceRequest{NodeId: node, FenceEpoch: 1, Admitted: true, Name: name})
	if err != nil {
		p.t.Fatal(err)
	}
	p.world.mu.Lock()
	p.world.instances["machine:"+name] = &worldInstance{
		node: node, ledger: ids.New(),
		results: map[string]*nodev1.TaskResult{},
	}
	p.world.mu.Unlock()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		if !gate.Reachable(p.t.Context(), p.seats[0].pool, node) {
			return fmt.Errorf("machine %s is not connected", name)
		}
		return nil
	})
	return node
}

// tenant makes a tenant of its own.
func (p *cluster) tenant() string {
	p.t.Helper()
	name := "x" + strings.ReplaceAll(ids.New(), "-", "")[18:]
	if _, err := p.seats[0].server.CreateTenant(p.t.Context(), &lifecyclev1.CreateTenantRequest{Name: name}); err != nil {
		p.t.Fatal(err)
	}
	return name
}

// create requests a workspace, waits until it is active, and returns its id.
func (p *cluster) create(tenant, name string, where commonv1.PlacementDriver) string {
	p.t.Helper()
	res, err := p.seats[0].server.RequestOperation(p.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: tenant, Name: name, Spec: &lifecyclev1.WorkspaceSpec{Placement: where, Gpus: 1},
		}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	p.rests(res.GetOperation().GetWorkspaceId(), "active")
	return res.GetOperation().GetWorkspaceId()
}

func (p *cluster) workspace(id string) workspace.Row {
	p.t.Helper()
	w, err := workspace.Get(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		p.t.Fatal(err)
	}
	return w
}

// rests waits until the workspace is in a state.
func (p *cluster) rests(id, state string) workspace.Row {
	p.t.Helper()
	return p.restsWithin(testkit.Patience, id, state)
}

// restsWithin is rests with a time limit, for a caller who delays replicas.
func (p *cluster) restsWithin(limit time.Duration, id, state string) workspace.Row {
	p.t.Helper()
	var w workspace.Row
	testkit.Eventually(p.t, limit, func() error {
		if w = p.workspace(id); w.State != state {
			run, _, _ := runs.Live(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
			return fmt.Errorf("the workspace is %s (%s), not %s: %s; %s", w.State, w.LastError, state, run.WhyWaiting,
				run.StepName())
		}
		return nil
	})
	return w
}

// restsAfterRetries is rests for a run that waits between its attempts: with each check the mesh's clock goes on by a
// second. The cluster's lease must be longer than all of it.
func (p *cluster) restsAfterRetries(id, state string) workspace.Row {
	p.t.Helper()
	var w workspace.Row
	var on time.Duration
	testkit.Eventually(p.t, testkit.Patience, func() error {
		on += time.Second
		testkit.SetClockOffset(p.db, on)
		if w = p.workspace(id); w.State != state {
			return fmt.Errorf("the workspace is %s (%s), not %s, %s later", w.State, w.LastError, state, on)
		}
		return nil
	})
	return w
}

// ask requests an operation on a workspace from a replica.
func (s *member) ask(ctx context.Context, kind commonv1.OperationKind, id string,
	change ...func(*lifecyclev1.RequestOperationRequest),
) (*lifecyclev1.Operation, error) {
	req := &lifecyclev1.RequestOperationRequest{
		Kind: kind, Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: id}, Reason: "a test asks",
	}
	for _, fn := range change {
		fn(req)
	}
	res, err := s.server.RequestOperation(ctx, req)
	return res.GetOperation(), err
}

func (p *cluster) count(sql string, args ...any) int {
	p.t.Helper()
	var n int
	if err := p.db.OwnerPool().QueryRow(p.t.Context(), sql, args...).Scan(&n); err != nil {
		p.t.Fatal(err)
	}
	return n
}
