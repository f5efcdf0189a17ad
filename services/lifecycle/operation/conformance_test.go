package operation

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/envelope"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
)

// The key that the fake agent's tasks are signed with.
var (
	fakeAgentPrivate      = ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))
	fakeAgentKey          = envelope.NewKey(fakeAgentPrivate)
	fakeAgentVerifiers, _ = envelope.NewVerifierSet(fakeAgentKey.Public())
)

// resource lists the resources that exist in the world and the workload database.
type resource struct {
	world    *world
	workload pg.Querier
	tenant   string
}

// List returns everything that provisioning makes.
func (r resource) List(ctx context.Context) ([]string, error) {
	out := r.world.standing()
	rows, err := r.workload.Query(ctx, `
		SELECT 'role ' || rolname FROM pg_roles WHERE starts_with(rolname, $1)
		UNION ALL SELECT 'schema ' || nspname FROM pg_namespace WHERE starts_with(nspname, $1) ORDER BY 1`, "t_"+r.tenant)
	if err != nil {
		return nil, err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return append(out, names...), err
}

func TestProvisioningKeepsTheContractOfTheSaga(t *testing.T) {
	t.Parallel()
	testkit.IO(t)
	db := testkit.DB(t)
	workloads, err := pg.Open(t.Context(), pg.Config{URL: db.WorkloadURL(), MaxConns: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(workloads.Close)
	w := newWorld()
	var core atomic.Pointer[saga.Core]
	committed := func() {
		if c := core.Load(); c != nil {
			c.Committed()
		}
	}
	pool := db.Pool("lifecycle")
	keys := secretKeys(t, secretenv.NewKey())
	w.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: testkit.Logger(t), DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(testkit.Logger(t), pool, nil),
		Committed: committed, Wake: func(ctx context.Context, tx pgx.Tx, runs ...string) error {
			return core.Load().Wake(ctx, tx, runs...)
		},
		Secrets: keys,
	})
	w.gates = gate.NewServer(gate.Deps{
		Logger: testkit.Logger(t), DB: pool, Join: anyJoin{}, Tasks: w.tasks,
		Instances: instances{&core}, Committed: committed, Slots: 4,
	})
	tenant := "x" + strings.ReplaceAll(ids.New(), "-", "")[18:]
	steps := provision.NewSteps(provision.StepDeps{
		Logger: testkit.Logger(t), DB: pool, Workloads: workloads, Committed: committed, Tasks: w.tasks, Identities: w,
		Secret: make([]byte, 32), Secrets: keys, Catalogue: catalogue(),
		Drivers: map[commonv1.PlacementDriver]placement.Driver{commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS: w},
	})
	reg, err := steps.Registry()
	if err != nil {
		t.Fatal(err)
	}
	def, _ := reg.Newest(provision.DefinitionProvision)
	full, err := catalogue().Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	full.Placement, full.Gpus = commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS, 1
	raw, err := names.MarshalJSON(full)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() { w.play(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	sagatest.Conform(t, sagatest.Case{
		DB: db, Definition: *def, Resource: resource{w, workloads, tenant},
		Input: spec.NewInput(tenant, "demo", json.RawMessage(raw)), Running: func(c *saga.Core) { core.Store(c) },
		Clean: func(ctx context.Context, workspaceID string) error {
			w.forget(workspaceID)
			name := "t_" + tenant + "_demo"
			return pgx.BeginFunc(ctx, workloads, func(tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, `UPDATE gpuaas_fence.schema SET dropped = true WHERE name = $1`, name); err != nil {
					return err
				}
				return schema.Drop(ctx, tx, name, false)
			})
		},
		Timeout: time.Minute,
	})
	for k, n := range w.launches {
		if n != 1 {
			t.Errorf("%s was launched %d times", k, n)
		}
	}
}

// instances wakes runs of whichever core drives now.
type instances struct{ core *atomic.Pointer[saga.Core] }

// SessionReady wakes the run of the instance.
func (b instances) SessionReady(ctx context.Context, tx pgx.Tx, g gate.Gate) error {
	return allocation.Registrations{Wakes: b.core.Load().Wakes}.SessionReady(ctx, tx, g)
}

// RegisterFailures writes the failures on the workspace.
func (b instances) RegisterFailures(ctx context.Context, tx pgx.Tx, ws string, epoch int64, count int32,
	text string,
) error {
	return allocation.Registrations{Wakes: b.core.Load().Wakes}.RegisterFailures(ctx, tx, ws, epoch, count, text)
}

// forget removes the resources that a successful run made, without the saga.
func (w *world) forget(workspaceID string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for k, b := range w.instances {
		if strings.HasPrefix(k, workspaceID+":") {
			b.ended, b.things = true, nil
			delete(w.identities, b.instance)
		}
	}
}
