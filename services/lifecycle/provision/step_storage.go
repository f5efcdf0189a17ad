package provision

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
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
			return untilRecovery(ctx, err)
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

// The stages of allocate, as attempts record them and the timeline shows them.
const (
	stageReserve       = "reserve"
	stageLaunch        = "launch"
	stageConnect       = "connect"
	stageBindDevices   = "hold_devices"
	stageMakeDirectory = "make_directory"
)

// stage is a part of a step's Do. It may be called again, and then makes nothing twice.
type stage struct {
	name string
	// do returns what the step has to wait for, empty if the next stage may begin.
	do func(ctx context.Context, env *saga.Env, p *place) (string, error)
	// stands reports whether the rows that the stage makes are there, so that a later one may build on them. It is nil for
	// the last stage.
	stands func(*place) bool
}

// place is where a workspace runs, as far as the stages of allocate have come.
type place struct {
	spec   *lifecyclev1.WorkspaceSpec
	driver placement.Driver

	allocation allocation.Allocation
	instance   allocation.Instance
	gate       gate.Gate
	claim      claims.Claim // on the directory
	made       *nodev1.StorageAllocateOutput
}

func (s *Steps) allocateStages() []stage {
	return []stage{
		{name: stageReserve, do: s.reserve, stands: func(p *place) bool {
			return p.allocation.ID != "" && p.instance.ID != ""
		}},
		{name: stageLaunch, do: s.launch, stands: func(p *place) bool {
			return p.instance.State == commonv1.InstanceState_INSTANCE_STATE_LIVE
		}},
		{name: stageConnect, do: s.connect, stands: func(p *place) bool { return p.gate.SessionEpoch != 0 }},
		{name: stageBindDevices, do: s.bindDevices, stands: func(p *place) bool { return p.allocation.Bound() }},
		{name: stageMakeDirectory, do: s.makeDirectory},
	}
}

// resume returns the stages that are left, and reads into p what those before them have made. The first is the one that
// the step was in, unless the rows of a stage before it are gone: then it is that one.
func (s *Steps) resume(ctx context.Context, env *saga.Env, p *place) ([]stage, error) {
	all := s.allocateStages()
	at := slices.IndexFunc(all, func(st stage) bool { return st.name == env.Stage })
	if at < 1 {
		return all, nil // no stage is recorded, or one of another build
	}
	if err := s.readPlace(ctx, env, p); err != nil {
		return nil, err
	}
	for n := range at {
		if !all[n].stands(p) {
			return all[n:], nil
		}
	}
	return all[at:], nil
}

// readPlace reads the allocation and the instance of this epoch, and the gate of the instance's node. What is not there
// stays empty.
func (s *Steps) readPlace(ctx context.Context, env *saga.Env, p *place) error {
	a, ok, err := allocation.Live(ctx, s.deps.DB, env.WorkspaceID)
	if err != nil {
		return err
	}
	if ok && a.Epoch == env.Epoch {
		p.allocation = a
	}
	if p.instance, _, err = allocation.InstanceOf(ctx, s.deps.DB, env.WorkspaceID, env.Epoch); err != nil {
		return err
	}
	if p.instance.NodeID == "" {
		return nil
	}
	if p.gate, _, err = gate.Get(ctx, s.deps.DB, p.instance.NodeID); err != nil {
		return fmt.Errorf("read gate: %w", err)
	}
	return nil
}

// reserve takes a slot, and makes the rows of the allocation and the instance.
func (s *Steps) reserve(ctx context.Context, env *saga.Env, p *place) (string, error) {
	var err error
	if p.allocation, p.instance, err = allocation.Reserve(ctx, env, p.spec, stageLaunch); err != nil {
		return "", s.deps.EpochRefusals.Note(atLaunch, err)
	}
	return "", nil
}

// connect waits for the session of the agent on the workspace's node.
func (s *Steps) connect(ctx context.Context, _ *saga.Env, p *place) (string, error) {
	if p.gate.SessionEpoch != 0 {
		return "", nil // it was read a moment ago
	}
	var err error
	if p.gate, _, err = gate.Get(ctx, s.deps.DB, p.instance.NodeID); err != nil {
		return "", fmt.Errorf("read gate: %w", err)
	}
	if p.gate.SessionEpoch == 0 {
		return "waiting for the agent on the workspace's node to connect", nil
	}
	return "", nil
}

// bindDevices binds the allocation to the node and GPUs of it.
func (s *Steps) bindDevices(ctx context.Context, env *saga.Env, p *place) (string, error) {
	var err error
	p.allocation, err = allocation.BindDevices(ctx, env, p.allocation, p.gate, stageMakeDirectory)
	return "", err
}

// makeDirectory has the agent make the workspace's directory.
func (s *Steps) makeDirectory(ctx context.Context, env *saga.Env, p *place) (string, error) {
	var err error
	p.claim, _, err = env.Intent(ctx,
		claims.Spec{
			Kind: allocation.KindStorage, Name: StorageName, Scope: commonv1.ClaimScope_CLAIM_SCOPE_NODE_LOCAL,
			NodeID: p.instance.NodeID,
		})
	if err != nil {
		return "", fmt.Errorf("claim storage: %w", err)
	}
	row, done, err := s.do(ctx, env, taskSpec{
		suffix: "storage", kind: commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE, nodeID: p.instance.NodeID,
		payload: &nodev1.StorageAllocate{Name: StorageName, SizeBytes: p.spec.GetStorageBytes()},
	})
	if err != nil {
		return "", err
	}
	if !done {
		why := "waiting for the agent to make the workspace's directory"
		if disk := p.gate.Host.GetStateDisk(); disk.GetFull() {
			why += "; the node's state directory has no room: " + disk.GetPath() + ": " + disk.GetDetail()
		}
		row.NodeCordoned = p.gate.Cordoned // which this attempt has read
		kept, err := s.keptFrom(ctx, row, commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE)
		return why + kept, err
	}
	p.made = &nodev1.StorageAllocateOutput{}
	if err := proto.Unmarshal(row.Output, p.made); err != nil {
		return "", fmt.Errorf("read result of storage.allocate: %w", err)
	}
	return "", nil
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
