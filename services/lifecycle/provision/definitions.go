package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/secretenv"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Names of the definitions.
const (
	DefinitionProvision    = "provision"
	DefinitionDecommission = "decommission"
	DefinitionRecreate     = "recreate"
	// A release cleans up what a failed one has left; the workspace ends failed, or decommissioned if that was under way.
	DefinitionRelease               = "release"
	DefinitionReleaseDecommissioned = "release_decommissioned"
)

// validate checks the request against the present configuration: an image or plan that was admitted may have been taken
// out of the catalogue meanwhile.
func (s *Steps) validate(_ context.Context, env *saga.Env) (saga.Outcome, error) {
	_, spec, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_INVALID_ARGUMENT,
			"the request cannot be read", err)
	}
	if err := s.deps.Catalogue.Check(spec); err != nil {
		f := fault.From(err)
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, f.Reason, f.Public, err)
	}
	if _, ok := s.deps.Drivers[spec.GetPlacement()]; !ok {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			"this placement is not available here", nil)
	}
	// Its values are opened again when each task is signed. Here nothing is made yet.
	err = s.deps.Secrets.Opens(spec, secretenv.Owner{TenantID: env.TenantID, WorkspaceID: env.WorkspaceID})
	return saga.Done(nil), err
}

var setEndpoints = pg.Define(pg.RoleLifecycle, "provision.set_endpoints", `
			UPDATE lifecycle.workspace SET node_id = $2, node_name = $3, endpoints = $4, register_failures = 0
			WHERE id = $1 AND epoch = $5`)

// markActive makes the workspace active: it writes rows and makes no resource.
func (s *Steps) markActive(_ context.Context, env *saga.Env) (saga.Outcome, error) {
	where, err := output[storageOutput](env, StepStorage)
	if err != nil {
		return saga.Outcome{}, err
	}
	ready, err := output[readyOutput](env, StepReady)
	if err != nil {
		return saga.Outcome{}, err
	}
	list := make([]*lifecyclev1.Endpoint, 0, len(ready.Endpoints))
	for _, e := range ready.Endpoints {
		list = append(list, &lifecyclev1.Endpoint{Workload: e.Workload, Name: e.Name, Url: e.URL})
	}
	raw, err := workspace.MarshalEndpoints(list)
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("encode endpoints: %w", err)
	}
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		_, err := pg.Exec(ctx, tx, setEndpoints, env.WorkspaceID, where.NodeID, where.NodeName, raw, env.Epoch)
		if err != nil {
			return fmt.Errorf("write endpoints: %w", err)
		}
		a, ok, err := allocation.Live(ctx, tx, env.WorkspaceID)
		if err != nil || !ok || a.State == commonv1.AllocationState_ALLOCATION_STATE_ACTIVE {
			return err
		}
		_, err = allocation.Set(ctx, tx, a, commonv1.AllocationState_ALLOCATION_STATE_ACTIVE, "in_use")
		return err
	}), nil
}

var clearEndpoints = pg.Define(pg.RoleLifecycle, "provision.clear_endpoints",
	`UPDATE lifecycle.workspace SET node_id = NULL, node_name = '', endpoints = '[]' WHERE id = $1`)

// clearPlace clears the columns in which the workspace shows where it ran.
func (s *Steps) clearPlace(_ context.Context, env *saga.Env) (saga.Outcome, error) {
	return saga.Done(nil, func(ctx context.Context, tx pgx.Tx) error {
		_, err := pg.Exec(ctx, tx, clearEndpoints, env.WorkspaceID)
		if err != nil {
			return fmt.Errorf("clear endpoints: %w", err)
		}
		return nil
	}), nil
}

// How long a step or a run may show no progress before it counts as stalled, where there is no policy.
const (
	stepStall      = 5 * time.Minute
	waitReadyStall = 10 * time.Minute
	sagaStall      = 15 * time.Minute
)

// Registry returns the definitions that this build runs. The usual causes of a step that hangs, and what to do about
// them, are in internal/runbook under the step's name.
func (s *Steps) Registry() (*saga.Registry, error) {
	step := func(
		name string, class saga.Class, do, undo saga.StepFunc, observe saga.ObserveFunc, layer commonv1.OwnerLayer,
		kinds ...string,
	) saga.Step {
		return saga.Step{
			Name: name, Class: class, Do: do, Undo: undo, Observe: observe, Kinds: kinds, StallAfter: stepStall,
			Layer: layer,
		}
	}
	validate := step(StepValidate, saga.Pure, s.validate, nil, nil, commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	validate.Retry = saga.RetryPolicy{Attempts: 1}
	storage := step(StepStorage, saga.Create, s.allocate, s.timely(s.release), s.observeStorage,
		commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, allocation.KindSlot, allocation.KindIdentity, allocation.KindInstance,
		allocation.KindStorage)
	storage.Retry = saga.RetryPolicy{Attempts: 5, First: time.Second, Max: 10 * time.Second}
	storage.Budget = 15 * time.Minute
	handle := step(StepHandle, saga.Create, s.makeHandle, s.timely(s.dropHandle), s.observeHandle,
		commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, allocation.KindHandle)
	schema := step(StepSchema, saga.Create, s.applySchema, s.timely(s.undoSchema), s.observeSchema,
		commonv1.OwnerLayer_OWNER_LAYER_DATABASE, allocation.KindSchema)
	schema.Retry = saga.RetryPolicy{Attempts: 8, First: 500 * time.Millisecond, Max: 10 * time.Second}
	deploy := step(StepDeploy, saga.Create, s.deploy, s.timely(s.remove), s.observeDeploy,
		commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, allocation.KindWorkload)
	ready := step(StepReady, saga.Pure, s.waitReady, nil, nil, commonv1.OwnerLayer_OWNER_LAYER_RUNTIME)
	ready.StallAfter, ready.Budget = waitReadyStall, 30*time.Minute
	active := step(StepActive, saga.Idempotent, s.markActive, nil, s.observeNothing,
		commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	active.Retain = true
	provision := saga.Definition{
		Name: DefinitionProvision, Version: 1, Steps: []saga.Step{validate, storage, handle, schema, deploy, ready, active},
		States: saga.WorkspaceStates{
			Running:   commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
			Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
			Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		},
		Deadline: time.Hour, StallAfter: sagaStall,
	}
	previous := step(StepPrevious, saga.Idempotent, s.endPrevious, nil, s.observePrevious,
		commonv1.OwnerLayer_OWNER_LAYER_DEPLOY)
	previous.Retry = saga.RetryPolicy{Attempts: 8, First: time.Second, Max: 30 * time.Second}
	recreate := saga.Definition{
		Name: DefinitionRecreate, Version: 1,
		Steps: []saga.Step{validate, previous, storage, handle, schema, deploy, ready, active},
		States: saga.WorkspaceStates{
			Running:   commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING,
			Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
			Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		},
		Deadline: time.Hour, StallAfter: sagaStall,
	}
	down := func(name string, do saga.StepFunc, layer commonv1.OwnerLayer, kinds ...string) saga.Step {
		return saga.Step{
			Name: name, Class: saga.Idempotent, Do: do, Observe: s.observeNothing, Kinds: kinds, StallAfter: stepStall,
			Layer: layer,
			Retry: saga.RetryPolicy{Attempts: 8, First: time.Second, Max: 30 * time.Second},
		}
	}
	forced := func(name string, do saga.StepFunc, layer commonv1.OwnerLayer, last bool, kinds ...string) saga.Step {
		return down(name, s.forced(s.timely(do), last, kinds...), layer, kinds...)
	}
	away := func(schema saga.StepFunc, last saga.Step) []saga.Step {
		return []saga.Step{
			forced("Remove tenant workloads", s.remove, commonv1.OwnerLayer_OWNER_LAYER_RUNTIME, false, allocation.KindWorkload),
			forced("Drop per-tenant schema", schema, commonv1.OwnerLayer_OWNER_LAYER_DATABASE, false, allocation.KindSchema),
			forced("Release workflow handle", s.dropHandle, commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, false,
				allocation.KindHandle),
			forced("Release storage and box", s.release, commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, true, allocation.KindSlot,
				allocation.KindIdentity, allocation.KindInstance, allocation.KindStorage),
			last,
		}
	}
	decommission := saga.Definition{
		Name: DefinitionDecommission, Version: 1,
		Steps: away(s.dropSchema, down("Mark decommissioned", s.clearPlace, commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)),
		States: saga.WorkspaceStates{
			Running:   commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
			Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
			Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		},
		Deadline: time.Hour, StallAfter: sagaStall, Sticks: true, Uncancellable: true,
	}
	release := func(name string, schema saga.StepFunc, running, ended commonv1.WorkspaceState) saga.Definition {
		return saga.Definition{
			Name: name, Version: 1, Steps: away(schema,
				down("Mark released", s.clearPlace, commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)),
			States: saga.WorkspaceStates{
				Running: running, Succeeded: ended,
				Failed: commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
			},
			Deadline: time.Hour, StallAfter: sagaStall, Sticks: true, Uncancellable: true,
		}
	}
	all := []saga.Definition{
		provision, recreate, decommission,
		release(DefinitionRelease, s.releaseSchema, commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING,
			commonv1.WorkspaceState_WORKSPACE_STATE_FAILED),
		release(DefinitionReleaseDecommissioned, s.dropSchema, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING,
			commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED),
	}
	for i := range all {
		all[i].BeforeStuck, all[i].OnStuck = gate.LockOfWorkspace, allocation.FailStuck
	}
	reg, err := saga.NewRegistry(all...)
	if err != nil {
		return nil, fmt.Errorf("define sagas: %w", err)
	}
	return reg, nil
}

// observeNothing is for steps that only write rows of this database in their own transaction: running the step again
// takes the place of an observation.
func (s *Steps) observeNothing(context.Context, *saga.Env) (saga.Observation, error) {
	return saga.Observation{Presence: saga.Partial, Why: "doing it again changes nothing"}, nil
}

// orDefault returns d, or def if d is not above zero.
func orDefault(d, def time.Duration) time.Duration {
	if d <= 0 {
		return def
	}
	return d
}
