package provision

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/services/lifecycle/allocation"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// The stages of allocate, as attempts record them and the timeline shows them.
const (
	stageReserve       = "reserve"
	stageLaunch        = "launch"
	stageConnect       = "connect"
	stageHoldDevices   = "hold_devices"
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
		{name: stageHoldDevices, do: s.holdDevices, stands: func(p *place) bool { return p.allocation.Bound() }},
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

// holdDevices binds the allocation to the node and GPUs of it.
func (s *Steps) holdDevices(ctx context.Context, env *saga.Env, p *place) (string, error) {
	var err error
	p.allocation, err = allocation.HoldDevices(ctx, env, p.allocation, p.gate, stageMakeDirectory)
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
