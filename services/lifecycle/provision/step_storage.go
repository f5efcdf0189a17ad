package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
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
// directory. It is called again after each wait and goes on from the rows that it finds.
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
	if s.deps.LaunchLog != nil && !s.deps.LaunchLog.Settled() {
		return saga.Wait(saga.WaitFor{
			For: 2 * time.Second, Why: "waiting until the launch log is compared with the database",
			WakeOnSignal: true,
		}), nil
	}
	a, i, err := allocation.Reserve(ctx, env, spec)
	if err != nil {
		return saga.Outcome{}, s.deps.EpochRefusals.Note(atLaunch, err)
	}
	i, err = s.launch(ctx, env, driver, a, i, spec)
	if fault.Has(err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE) {
		// The former instance is ended well within the budget of this step, by the sweep of the placement's own list at the
		// latest.
		_ = s.deps.EpochRefusals.Note(atLaunch,
			saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), fault.From(err).Public, err))
		return waitTask(previousAlive(err)), nil
	}
	if err != nil {
		return saga.Outcome{}, s.deps.EpochRefusals.Note(atLaunch, err)
	}
	g, ok, err := gate.Get(ctx, s.deps.DB, i.NodeID)
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("read gate: %w", err)
	}
	if !ok || g.SessionEpoch == 0 {
		return waitTask("waiting for the agent on the workspace's node to connect"), nil
	}
	if a, err = allocation.HoldDevices(ctx, env, a, g); err != nil {
		return saga.Outcome{}, err
	}
	claim, _, err := env.Intent(ctx,
		claims.Spec{
			Kind: allocation.KindStorage, Name: StorageName, Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL,
			NodeID: i.NodeID,
		})
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("claim storage: %w", err)
	}
	raw, done, err := s.do(ctx, env, taskSpec{
		suffix: "storage", kind: commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE, nodeID: i.NodeID,
		payload: &nodev1.StorageAllocate{Name: StorageName, SizeBytes: spec.GetStorageBytes()},
	})
	if err != nil {
		return saga.Outcome{}, err
	}
	if !done {
		why := "waiting for the agent to make the workspace's directory"
		if disk := g.Host.GetStateDisk(); disk.GetFull() {
			why += "; the node's state directory has no room: " + disk.GetPath() + ": " + disk.GetDetail()
		}
		return waitTask(why), nil
	}
	made := &nodev1.StorageAllocateOutput{}
	if err := proto.Unmarshal(raw, made); err != nil {
		return saga.Outcome{}, fmt.Errorf("read result of storage.allocate: %w", err)
	}
	return saga.Done(storageOutput{
		AllocationID: a.ID, InstanceID: i.ID, NodeID: i.NodeID, NodeName: g.Name, Path: made.GetPath(),
		Enforced: made.GetEnforced(), Devices: a.Devices,
	}, func(ctx context.Context, tx pgx.Tx) error { return env.ConfirmTx(ctx, tx, claim, made.GetPath()) }), nil
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
