package findings

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/findings/detect"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/operation"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/tenants"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	byProcess = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS
	active    = commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE
	gone      = commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED

	kCreate       = commonv1.OperationKind_OPERATION_KIND_CREATE
	kCancel       = commonv1.OperationKind_OPERATION_KIND_CANCEL
	kReset        = commonv1.OperationKind_OPERATION_KIND_RESET
	kRetry        = commonv1.OperationKind_OPERATION_KIND_RETRY
	kRecreate     = commonv1.OperationKind_OPERATION_KIND_RECREATE
	kDecommission = commonv1.OperationKind_OPERATION_KIND_DECOMMISSION
)

const superuser = "superuser"

// bed is a working lifecycle: real sagas over a real database and workload database, a sequencer, and a world of
// instances; and a sweeper over it.
type bed struct {
	keys      *secretenv.Keys
	keyLine   string // of the key file
	t         *testing.T
	db        *testkit.Database
	world     *world
	core      *saga.Core
	server    *operation.Server
	workloads *pgxpool.Pool
	sweeper   *Sweeper
	reg       *obs.Registry
	tenant    string
	skew      time.Duration
	hands     map[string]*pgx.Conn
}

func newBed(t *testing.T, cfg Config) *bed {
	t.Helper()
	testkit.IO(t)
	if cfg.Page == 0 {
		cfg.Page = 2 // so that the findings are on several pages
	}
	db := testkit.DB(t)
	workloads, err := pg.Open(t.Context(), pg.Config{URL: db.WorkloadURL(), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(workloads.Close)
	b := &bed{
		t: t, db: db, world: newWorld(), workloads: workloads,
		tenant: "x" + strings.ReplaceAll(ids.New(), "-", "")[18:],
	}
	pool := db.Pool(pg.RoleLifecycle)
	catalogue := spec.Catalogue{
		Plans:   map[string]spec.Plan{"local": {MaxGPUs: 8, MaxStorageBytes: 1 << 40, MaxWorkloads: 4}},
		Regions: []string{"here"}, Placements: []commonv1.PlacementDriver{byProcess}, Default: byProcess,
	}
	drivers := map[commonv1.PlacementDriver]placement.Driver{byProcess: b.world}
	committed := func() { b.core.Committed() }
	b.keyLine = secretenv.NewKey()
	keys, err := secretenv.Parse(b.keyLine)
	if err != nil {
		t.Fatal(err)
	}
	tasks := dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(testkit.Logger(t), pool, nil),
		Committed: committed, Wake: func(ctx context.Context, tx pgx.Tx, runs ...string) error {
			return b.core.Wake(ctx, tx, runs...)
		},
		Secrets: keys,
	})
	steps := provision.NewSteps(provision.StepDeps{
		Logger: testkit.Logger(t), DB: pool, Workloads: workloads, Committed: committed, Tasks: tasks,
		Identities: b.world, Secret: make([]byte, 32), Secrets: keys, Catalogue: catalogue, Drivers: drivers,
	})
	registry, err := steps.Registry()
	if err != nil {
		t.Fatal(err)
	}
	appended := &events.Signal{}
	b.core, err = saga.New(saga.Deps{
		DB: pool, Registry: registry, Logger: testkit.Logger(t),
		Wakes: saga.NewWakes(appended),
	})
	if err != nil {
		t.Fatal(err)
	}
	b.world.tasks = tasks
	b.world.gates = gate.NewServer(gate.Deps{
		Logger: testkit.Logger(t), DB: pool, Join: anyJoin{}, Tasks: tasks,
		Instances: allocation.Registrations{Wakes: b.core.Wakes}, Committed: committed, Slots: 4,
	})
	b.keys = keys
	b.server = operation.NewServer(operation.Deps{
		Logger: testkit.Logger(t), DB: pool, Core: b.core, Catalogue: catalogue, Policy: policy.Fixed{Set: policy.Defaults()},
		DefaultQuota: tenants.Quota{Workspaces: 100, GPUs: 100, StorageBytes: 1 << 50}, Secrets: keys,
	})
	if b.reg, err = obs.NewRegistry(); err != nil {
		t.Fatal(err)
	}
	b.sweeper, err = New(Deps{
		Logger: testkit.Logger(t), DB: pool, Workloads: workloads, Drivers: drivers, Metrics: b.reg.ForService("lifecycle"),
		Committed: committed,
	}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.server.CreateTenant(t.Context(), &lifecyclev1.CreateTenantRequest{Name: b.tenant}); err != nil {
		t.Fatal(err)
	}
	b.run(appended)
	return b
}

// run drives the sagas, the instances and the sequencer until the test ends.
func (b *bed) run(appended *events.Signal) {
	b.t.Helper()
	driver, err := drive.New(b.core, drive.Config{
		Owner: ids.New(), Workers: 16, Lease: 15 * time.Second, Heartbeat: 200 * time.Millisecond,
		Poll: 50 * time.Millisecond, CancelGrace: 2 * time.Second, StopGrace: time.Second, StallSweep: time.Second,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	sequencer, err := events.NewSequencer(events.SequencerDeps{
		Pool: b.db.Pool(pg.RoleSequencer), Wake: appended,
		Logger: testkit.Logger(b.t),
	}, events.SequencerConfig{})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(b.t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() { b.world.play(ctx) })
	wg.Go(func() { _ = sequencer.Run(ctx) })
	wg.Go(func() { _ = driver.Run(ctx) })
	b.t.Cleanup(func() { stop(); wg.Wait() })
}

func (b *bed) create(ctx context.Context, name string) (string, error) {
	res, err := b.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: kCreate,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: b.tenant, Name: name,
			Spec: &lifecyclev1.WorkspaceSpec{Gpus: 1},
		}},
	})
	return res.GetOperation().GetWorkspaceId(), err
}

func (b *bed) operate(ctx context.Context, kind commonv1.OperationKind, workspaceID string) error {
	_, err := b.server.RequestOperation(ctx, &lifecyclev1.RequestOperationRequest{
		Kind: kind, Reason: "a test", Target: &lifecyclev1.RequestOperationRequest_WorkspaceId{WorkspaceId: workspaceID},
	})
	return err
}

// live makes a workspace and waits until it is active.
func (b *bed) live(name string) string {
	b.t.Helper()
	id, err := b.create(b.t.Context(), name)
	if err != nil {
		b.t.Fatal(err)
	}
	b.until(id, active)
	return id
}

// until waits for a state of a workspace whose run is over.
func (b *bed) until(workspaceID string, states ...commonv1.WorkspaceState) {
	b.t.Helper()
	var want []string
	for _, s := range states {
		want = append(want, names.Of(s))
	}
	testkit.Eventually(b.t, 2*time.Minute, func() error {
		w, err := workspace.Get(b.t.Context(), b.db.Pool(pg.RoleLifecycle), workspaceID)
		if err != nil {
			return err
		}
		if slices.Contains(want, w.State) {
			return nil
		}
		return fmt.Errorf("it is %s: %s", w.State, w.LastError)
	})
}

// as runs a statement outside the product, as a person does who has the password of a role: in a session that is none
// of the product's.
func (b *bed) as(role, sql string, args ...any) {
	b.t.Helper()
	conn := b.hand(role)
	tag, err := conn.Exec(b.t.Context(), sql, args...)
	if err != nil || tag.RowsAffected() != 1 {
		b.t.Fatalf("%s: %v, %d rows", sql, err, tag.RowsAffected())
	}
}

// hand connects as a person who has the password of a role, or of the superuser; one connection for each role.
func (b *bed) hand(role string) *pgx.Conn {
	b.t.Helper()
	if conn, ok := b.hands[role]; ok {
		return conn
	}
	url := b.db.AdminURL()
	if role != superuser {
		url = b.db.URL(role)
	}
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		b.t.Fatal(err)
	}
	cfg.RuntimeParams["application_name"], cfg.RuntimeParams["timezone"] = "psql", "Asia/Kolkata"
	conn, err := pgx.ConnectConfig(b.t.Context(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(b.t.Context())) })
	if b.hands == nil {
		b.hands = map[string]*pgx.Conn{}
	}
	b.hands[role] = conn
	return conn
}

func (b *bed) sweep() Swept {
	b.t.Helper()
	out, err := b.sweeper.Sweep(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

// pass lets the grace go by.
func (b *bed) pass(d time.Duration) {
	b.skew += d
	testkit.SetClockOffset(b.db, b.skew)
}

// seen sweeps, lets the grace go by, and sweeps again; it returns the open findings by kind and subject.
func (b *bed) seen() map[string]finding.Row {
	b.t.Helper()
	b.sweep()
	b.pass(b.sweeper.cfg.Grace + time.Second)
	b.sweep()
	return b.open()
}

func (b *bed) open() map[string]finding.Row {
	b.t.Helper()
	rows, err := b.db.OwnerPool().Query(b.t.Context(),
		`SELECT `+finding.Columns+` FROM lifecycle.finding f WHERE f.resolved_at IS NULL`)
	if err != nil {
		b.t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[finding.Stored])
	if err != nil {
		b.t.Fatal(err)
	}
	out := map[string]finding.Row{}
	for i := range found {
		f, err := found[i].Finding()
		if err != nil {
			b.t.Fatal(err)
		}
		out[names.Of(f.Kind)+" "+f.SubjectType+" "+f.SubjectID] = f
	}
	return out
}

func (b *bed) text(sql string, args ...any) string {
	b.t.Helper()
	var out string
	if err := b.db.Pool(pg.RoleLifecycle).QueryRow(b.t.Context(), sql, args...).Scan(&out); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
	return out
}

// observed writes an agent's report on a workspace, as nodeapi would.
func (b *bed) observed(node, workspaceID string, workloads ...string) {
	b.t.Helper()
	o := &nodev1.Observation{WorkspaceId: workspaceID}
	for _, name := range workloads {
		o.Workloads = append(o.Workloads,
			&nodev1.WorkloadStatus{Name: name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING})
	}
	b.observe(node, o)
}

// observe writes an agent's report, as nodeapi would.
func (b *bed) observe(node string, o *nodev1.Observation) {
	b.t.Helper()
	err := pg.InTx(b.t.Context(), b.db.Pool(pg.RoleNodeAPI), func(ctx context.Context, tx pgx.Tx) error {
		_, err := events.Append(ctx, tx, events.Event{
			Kind: detect.ObservedKind, AggregateType: "observation", AggregateID: o.GetWorkspaceId(),
			AggregateVersion: time.Now().UnixNano(), Payload: o,
			Correlation: events.Correlation{WorkspaceID: o.GetWorkspaceId(), NodeID: node},
		})
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	b.numbered()
}

// numbered waits until every event has its place.
func (b *bed) numbered() {
	b.t.Helper()
	testkit.Eventually(b.t, testkit.Patience, func() error {
		var last, highest int64
		err := b.db.Pool(pg.RoleLifecycle).QueryRow(b.t.Context(),
			`SELECT (SELECT coalesce(max(highest), 0) FROM events.numbered),
			(SELECT coalesce(max(seq), 0) FROM events.event)`).Scan(&highest, &last)
		if err != nil {
			return err
		}
		if highest < last {
			return fmt.Errorf("%d of %d", highest, last)
		}
		return nil
	})
}
