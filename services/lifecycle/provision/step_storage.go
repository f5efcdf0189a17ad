package provision

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
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
	driver, ok := s.Deps.Drivers[spec.GetPlacement()]
	if !ok {
		return saga.Outcome{}, saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_PLACEMENT_UNAVAILABLE,
			fmt.Sprintf("placement %s is not available here", names.Of(spec.GetPlacement())), nil)
	}
	if s.Deps.LaunchLog != nil && !s.Deps.LaunchLog.Settled() {
		return saga.Wait(saga.WaitFor{
			For: 2 * time.Second, Why: "waiting until the launch log is compared with the database",
			WakeOnSignal: true,
		}), nil
	}
	a, i, err := s.reserve(ctx, env, spec)
	if err != nil {
		return saga.Outcome{}, s.Deps.EpochRefusals.Note(AtLaunch, err)
	}
	i, err = s.launch(ctx, env, driver, a, i, spec)
	if fault.Has(err, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE) {
		// The former instance is ended well within the budget of this step, by the sweep of the placement's own list at the
		// latest.
		_ = s.Deps.EpochRefusals.Note(AtLaunch,
			saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, fault.ReasonOf(err), fault.From(err).Public, err))
		return waitTask(previousAlive(err)), nil
	}
	if err != nil {
		return saga.Outcome{}, s.Deps.EpochRefusals.Note(AtLaunch, err)
	}
	g, ok, err := gate.Get(ctx, s.Deps.DB, i.NodeID)
	if err != nil {
		return saga.Outcome{}, fmt.Errorf("read gate: %w", err)
	}
	if !ok || g.SessionEpoch == 0 {
		return waitTask("waiting for the agent on the workspace's node to connect"), nil
	}
	if a, err = s.holdDevices(ctx, env, a, g); err != nil {
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

var insertInstance = pg.Define(pg.RoleLifecycle, "provision.insert_instance", `
			INSERT INTO lifecycle.instance AS i (instance_id, workspace_id, tenant_id, epoch, state, placement, node_id)
			VALUES ($1, $2, $3, $4, 'prepared', $5, nullif($6, '')::uuid) RETURNING `+allocation.InstanceColumns)

// reserve makes the rows of the allocation and the instance of this epoch, or reads those that exist.
func (s *Steps) reserve(ctx context.Context, env *saga.Env, spec *lifecyclev1.WorkspaceSpec) (allocation.Allocation,
	allocation.Instance,
	error,
) {
	var a allocation.Allocation
	var i allocation.Instance
	err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		var ok bool
		var err error
		if a, ok, err = allocation.Live(ctx, tx, env.WorkspaceID); err != nil {
			return err
		}
		if ok {
			if a.Epoch != env.Epoch {
				return saga.Fail(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE,
					"an earlier epoch of the workspace still holds its allocation", nil)
			}
		} else if a, err = s.insertAllocation(ctx, tx, env, spec); err != nil {
			return err
		}
		if i, ok, err = allocation.InstanceOf(ctx, tx, env.WorkspaceID, env.Epoch); err != nil || ok {
			return err
		}
		i, err = allocation.OneInstance(ctx, tx, insertInstance,
			a.InstanceID, env.WorkspaceID, env.TenantID, env.Epoch, names.Of(spec.GetPlacement()), a.NodeID)
		if err != nil {
			return fmt.Errorf("insert instance: %w", err)
		}
		if _, err := events.Append(ctx, tx, a.Event(), i.Event()); err != nil {
			return fmt.Errorf("report reservation: %w", err)
		}
		return nil
	})
	return a, i, err
}

var insertAllocationRow = pg.Define(pg.RoleLifecycle, "provision.insert_allocation_row", `
		INSERT INTO lifecycle.allocation AS a (allocation_id, workspace_id, tenant_id, epoch, state, placement, node_id, instance_id, slot, gpus, occupancy)
		VALUES ($1, $2, $3, $4, 'allocating', $5, nullif($6, '')::uuid, $7, $8, $9, 'reserved') RETURNING `+allocation.Columns)

func (s *Steps) insertAllocation(ctx context.Context, tx pgx.Tx, env *saga.Env,
	spec *lifecyclev1.WorkspaceSpec,
) (allocation.Allocation, error) {
	allocationID, instanceID := ids.New(), ids.New()
	var node string
	var slot *int32
	if spec.GetPlacement() == commonv1.PlacementDriver_PLACEMENT_DRIVER_STATIC {
		var n int32
		var err error
		if node, n, err = allocation.TakeSlot(ctx, tx, spec.GetGpus()); err != nil {
			return allocation.Allocation{}, err
		}
		slot = &n
	}
	if err := claimSlot(ctx, tx, env, node, allocationID); err != nil {
		return allocation.Allocation{}, err
	}
	a, err := allocation.One(ctx, tx, insertAllocationRow,
		allocationID, env.WorkspaceID, env.TenantID, env.Epoch, names.Of(spec.GetPlacement()), node, instanceID, slot,
		spec.GetGpus())
	if err != nil {
		return allocation.Allocation{}, fmt.Errorf("insert allocation: %w", err)
	}
	return a, nil
}

// claimSlot claims and confirms the slot of this epoch, in the transaction that inserts its allocation.
func claimSlot(ctx context.Context, tx pgx.Tx, env *saga.Env, nodeID, allocationID string) error {
	claim, _, err := env.IntentTx(ctx, tx, claims.Spec{
		Kind: allocation.KindSlot, Name: fmt.Sprintf("slot-%d", env.Epoch), Scope: commonv1.ClaimScope_CLAIM_SCOPE_SHARED,
		NodeID: nodeID,
	})
	if err == nil {
		err = env.ConfirmTx(ctx, tx, claim, allocationID)
	}
	if err != nil {
		return fmt.Errorf("claim slot: %w", err)
	}
	return nil
}

var leasedDevices = pg.Define(pg.RoleLifecycle, "provision.held_devices",
	`SELECT device_id FROM lifecycle.gpu_hold WHERE node_id = $1`)

var holdDevice = pg.Define(pg.RoleLifecycle, "provision.hold_device",
	`INSERT INTO lifecycle.gpu_hold (node_id, device_id, allocation_id) VALUES ($1, $2, $3)`)

var bindAllocation = pg.Define(pg.RoleLifecycle, "provision.bind_allocation",
	`UPDATE lifecycle.allocation a SET node_id = $2, version = a.version + 1
			WHERE a.allocation_id = $1 RETURNING `+allocation.Columns)

// holdDevices binds GPUs of the node to the allocation. The table's key refuses a device that another allocation holds.
func (s *Steps) holdDevices(ctx context.Context, env *saga.Env, a allocation.Allocation,
	g gate.Gate,
) (allocation.Allocation, error) {
	if a.NodeID != "" && len(a.Devices) >= int(a.GPUs) {
		return a, nil
	}
	was := a
	err := env.Tx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		a = was // a second try begins where the first did
		var free []string
		held, err := pg.Values[string](ctx, tx, leasedDevices, g.NodeID)
		if err != nil {
			return fmt.Errorf("read held devices: %w", err)
		}
		taken := map[string]bool{}
		for _, d := range held {
			taken[d] = true
		}
		for _, d := range g.Host.GetGpus() {
			if !taken[d.GetDeviceId()] {
				free = append(free, d.GetDeviceId())
			}
		}
		want := int(a.GPUs) - len(a.Devices)
		if len(free) < want {
			return saga.Retry(commonv1.OwnerLayer_OWNER_LAYER_DEPLOY, commonv1.Reason_REASON_NO_CAPACITY,
				fmt.Sprintf("the node has %d free GPUs, %d are needed", len(free), want), nil)
		}
		for _, d := range free[:max(want, 0)] {
			if _, err := pg.Exec(ctx, tx, holdDevice, g.NodeID, d, a.ID); err != nil {
				return fmt.Errorf("hold device: %w", err)
			}
		}
		moved, err := allocation.One(ctx, tx, bindAllocation, a.ID, g.NodeID)
		if err != nil {
			return fmt.Errorf("bind allocation to node: %w", err)
		}
		if _, err := events.Append(ctx, tx, moved.Event()); err != nil {
			return fmt.Errorf("report allocation: %w", err)
		}
		a = moved
		return nil
	})
	return a, err
}

// observeStorage observes whether the step's work stands: the allocation, the live instance and the confirmed directory
// of this epoch.
func (s *Steps) observeStorage(ctx context.Context, env *saga.Env) (saga.Observation, error) {
	a, ok, err := allocation.Live(ctx, s.Deps.DB, env.WorkspaceID)
	if err != nil {
		return saga.Observation{}, err
	}
	if !ok || a.Epoch != env.Epoch {
		return saga.Observation{Presence: saga.Absent}, nil
	}
	i, ok, err := allocation.InstanceOf(ctx, s.Deps.DB, env.WorkspaceID, env.Epoch)
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
	g, _, err := gate.Get(ctx, s.Deps.DB, i.NodeID)
	if err != nil {
		return saga.Observation{}, fmt.Errorf("read gate: %w", err)
	}
	return saga.Observation{Presence: saga.Present, Output: storageOutput{
		AllocationID: a.ID, InstanceID: i.ID, NodeID: i.NodeID, NodeName: g.Name, Path: held[0].ExternalRef,
		Devices: a.Devices,
	}}, nil
}
