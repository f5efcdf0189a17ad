package operation

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
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
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/task/dispatch"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// standingInstances lists everything that exists in the world, with one more line for each workspace with two
// instances.
type standingInstances struct{ *world }

// List returns the world's own list.
func (s standingInstances) List(context.Context) ([]string, error) {
	out := s.standing()
	instances := map[string]int{}
	for _, line := range out {
		if k, ok := strings.CutPrefix(line, "box "); ok {
			id, _, _ := strings.Cut(k, ":")
			if instances[id]++; instances[id] == 2 {
				out = append(out, "two boxes of "+id)
			}
		}
	}
	return out, nil
}

// The steps that a recreation has of its own, and the first that it shares: the end of the former instance and the
// launch of the next, with every fault at every point. The conformance test of provisioning covers the steps after
// these.
func TestTheChangeOfInstancesKeepsTheContractOfTheSaga(t *testing.T) {
	t.Parallel()
	testkit.IO(t)
	db := testkit.DB(t)
	w := newWorld()
	w.replica = ids.New()
	var core atomic.Pointer[saga.Core]
	committed := func() {
		if c := core.Load(); c != nil {
			c.Committed()
		}
	}
	pool := db.Pool(pg.RoleLifecycle)
	log := testkit.Logger(t)
	keys := secretKeys(t, secretenv.NewKey())
	w.tasks = dispatch.NewServer(dispatch.Deps{
		Logger: log, DB: pool, Key: fakeAgentKey, Hub: dispatch.NewHub(log, pool, nil), Committed: committed,
		Wake:    func(ctx context.Context, tx pgx.Tx, runs ...string) error { return core.Load().Wake(ctx, tx, runs...) },
		Secrets: keys,
	})
	w.gates = gate.NewServer(gate.Deps{
		Logger: log, DB: pool, Join: anyJoin{}, Tasks: w.tasks, Instances: instances{&core},
		Committed: committed, Slots: 4,
	})
	steps := provision.NewSteps(provision.StepDeps{
		Logger: log, DB: pool, Committed: committed, Tasks: w.tasks, Identities: w, Secret: make([]byte, 32), Secrets: keys,
		Catalogue: catalogue(),
		Drivers:   map[commonv1.PlacementDriver]placement.Driver{commonv1.PlacementDriver_PLACEMENT_DRIVER_PROCESS: w},
	})
	reg, err := steps.Registry()
	if err != nil {
		t.Fatal(err)
	}
	def, _ := reg.Newest(provision.DefinitionRecreate)
	short := *def
	for i, s := range def.Steps {
		if s.Name == provision.StepStorage {
			short.Steps = def.Steps[:i+1]
		}
	}
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
		DB: db, Definition: short, Resource: standingInstances{w}, Input: spec.NewInput("acme", "demo", json.RawMessage(raw)),
		Running: func(c *saga.Core) { core.Store(c) },
		Workspace: func(ctx context.Context, c *saga.Core, tx pgx.Tx) (string, error) {
			return w.furnish(ctx, c, tx)
		},
		Clean:   func(_ context.Context, workspaceID string) error { w.forget(workspaceID); return nil },
		Timeout: time.Minute,
	})
	for k, n := range w.launches {
		if n != 1 {
			t.Errorf("%s was launched %d times", k, n)
		}
	}
	if len(w.overlaps) > 0 {
		t.Errorf("two boxes of one workspace: %v", w.overlaps)
	}
}

// furnish makes a workspace that runs in epoch 1, in the rows and in the world, as a provisioning would have left it.
func (w *world) furnish(ctx context.Context, c *saga.Core, tx pgx.Tx) (string, error) {
	tenant, id, instance, alloc, run := ids.New(), ids.New(), ids.New(), ids.New(), ids.New()
	if _, err := tx.Exec(ctx, `INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`, tenant, "t-"+tenant); err != nil {
		return "", err
	}
	if _, err := workspace.Insert(ctx, tx,
		workspace.Draft{ID: id, TenantID: tenant, Name: "w-" + id, CreatedBy: "test"}); err != nil {
		return "", err
	}
	prepared, err := w.PrepareInstance(ctx,
		&recoveryv1.PrepareInstanceRequest{WorkspaceId: id, Epoch: 1, InstanceId: instance, NodeName: "box"})
	if err != nil {
		return "", err
	}
	node := prepared.GetNodeId()
	if _, err := w.Launch(ctx, placement.LaunchRequest{WorkspaceID: id, Epoch: 1, InstanceID: instance}); err != nil {
		return "", err
	}
	w.mu.Lock()
	w.instances[id+":1"].things = []string{"storage", "workload demo"}
	w.instances[id+":1"].results = map[string]*nodev1.TaskResult{}
	w.mu.Unlock()
	if _, err := tx.Exec(ctx, `UPDATE lifecycle.workspace SET epoch = 1, state = 'active' WHERE id = $1`, id); err != nil {
		return "", err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO lifecycle.allocation (allocation_id, workspace_id, tenant_id, epoch, state,
		placement, node_id, instance_id, gpus, occupancy)
		VALUES ($1, $2, $3, 1, 'active', 'process', $4, $5, 1, 'in_use')`, alloc, id, tenant, node, instance); err != nil {
		return "", err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO lifecycle.instance (instance_id, workspace_id, tenant_id, epoch, state,
		placement, node_id, started_at)
		VALUES ($1, $2, $3, 1, 'live', 'process', $4, mesh.clock())`, instance, id, tenant, node); err != nil {
		return "", err
	}
	for kind, name := range map[string]string{
		allocation.KindSlot: "slot-1", allocation.KindIdentity: instance, allocation.KindInstance: id + ":1",
		allocation.KindStorage: provision.StorageName, allocation.KindWorkload: "demo",
	} {
		_, err := tx.Exec(ctx, `INSERT INTO lifecycle.resource_claim (id, workspace_id, tenant_id, run_id, step, kind, scope,
			deterministic_name, epoch, node_id, confirmed_at)
			VALUES ($1, $2, $3, $4, 1, $5, $6, $7, 1, $8, mesh.clock())`, ids.New(), id, tenant, run, kind,
			map[bool]string{true: "node_local", false: "shared"}[kind == allocation.KindStorage ||
				kind == allocation.KindWorkload], name, node)
		if err != nil {
			return "", fmt.Errorf("claim %s: %w", kind, err)
		}
	}
	return id, nil
}
