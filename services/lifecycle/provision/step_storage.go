package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/spec"
)

// StorageName is the workspace's directory on its node: one for all its workloads.
const StorageName = "data"

// storageOutput is the output of this step, which later steps read.
type storageOutput struct {
	AllocationID string   `json:"allocation_id"`
	InstanceID   string   `json:"instance_id"`
	NodeID       string   `json:"node_id"`
	NodeName     string   `json:"node_name"`
	Path         string   `json:"path"`
	Enforced     bool     `json:"limit_enforced"`
	Devices      []string `json:"gpu_device_ids"`
}

// allocate reserves a slot and GPUs, has an instance launched, waits for its session and has the agent make the
// directory. It does so in stages: after a wait or another attempt it goes on in the stage that it was in.
func (s *Steps) allocate(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
	_, spec, err := spec.Read(env.Input)
	if err != nil {
		return saga.Outcome{}, err
	}
	driver, ok := s.deps.Drivers[spec.GetPlacement()]
	if !ok {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			fmt.Sprintf("placement %s is not available here", names.Of(spec.GetPlacement())), nil)
	}
	p := &place{spec: spec, driver: driver}
	left, err := s.resume(ctx, env, p)
	if err != nil {
		return saga.Outcome{}, err
	}
	if err := env.Enter(ctx, left[0].name); err != nil {
		return saga.Outcome{}, err
	}
	if s.deps.LaunchLog != nil && !s.deps.LaunchLog.Compared() {
		return saga.Wait(saga.WaitFor{
			For: 2 * time.Second, Why: "waiting until the launch log is compared with the database",
			WakeOnSignal: true,
		}), nil
	}
	for _, st := range left {
		if err := env.Enter(ctx, st.name); err != nil {
			return saga.Outcome{}, err
		}
		why, err := st.do(ctx, env, p)
		if err != nil {
			return saga.Outcome{}, err
		}
		if why != "" {
			return waitTask(why), nil
		}
	}
	return saga.Done(storageOutput{
		AllocationID: p.allocation.ID, InstanceID: p.instance.ID, NodeID: p.instance.NodeID, NodeName: p.gate.Name,
		Path: p.made.GetPath(), Enforced: p.made.GetEnforced(), Devices: p.allocation.Devices,
	}, func(ctx context.Context, tx pgx.Tx) error { return env.ConfirmTx(ctx, tx, p.claim, p.made.GetPath()) }), nil
}

// observeStorage observes whether the step's work stands: the allocation, the live instance and the confirmed directory
// of this epoch.
func (s *Steps) observeStorage(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	a, ok, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Observation{}, err
	}
	if !ok || a.Epoch != env.Epoch {
		return saga.Observation{Presence: saga.Absent}, nil
	}
	i, ok, err := allocation.InstanceOf(ctx, s.deps.DB, env.WorkspaceID, env.Epoch)
	if err != nil {
		return saga.Observation{}, err
	}
	held, err := claimsOf(ctx, env, allocation.KindStorage)
	if err != nil {
		return saga.Observation{}, err
	}
	if !ok || i.State != commonv1.InstanceState_INSTANCE_STATE_LIVE || len(held) == 0 || held[0].ConfirmedAt == nil {
		return saga.Observation{Presence: saga.Partial, Why: "the instance or its directory is not there yet"}, nil
	}
	g, _, err := gate.Get(ctx, s.deps.DB, i.NodeID)
	if err != nil {
		return saga.Observation{}, fmt.Errorf("read gate: %w", err)
	}
	return saga.Observation{Presence: saga.Present, Output: storageOutput{
		AllocationID: a.ID, InstanceID: i.ID, NodeID: i.NodeID, NodeName: g.Name, Path: held[0].ExternalRef,
		Devices: a.Devices,
	}}, nil
}
