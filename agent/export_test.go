package agent

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
	"github.com/gpuaas/mesh/agent/runtime/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// Serve does the first work for a workspace on an agent that is not connected: it takes a task into the ledger, and
// makes the workspace's storage.
func Serve(ctx context.Context, a *Agent, workspaceID string) error {
	_, err := a.ledger.Deliver(ctx, ledger.Delivery{
		Key: ledger.Key{TaskID: ids.New(), Attempt: 1}, Type: commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE,
		WorkspaceID: workspaceID, Epoch: 1, OpSeq: 1, ExpiresAt: time.Now().Add(time.Minute), Envelope: []byte("envelope"),
	})
	if err != nil {
		return err
	}
	if _, err := a.disk.Allocate(ctx, workspaceID, "data", 1<<20); err != nil {
		return err
	}
	_, err = a.disk.List(ctx)
	return err
}

// Redeploy runs a workload again and removes it.
func Redeploy(ctx context.Context, a *Agent, workspaceID string, deploy *nodev1.WorkloadDeploy) error {
	dir, _, err := a.disk.Path(workspaceID, deploy.GetStorageName())
	if err != nil {
		return err
	}
	status, err := a.work.Deploy(ctx,
		process.Request{WorkspaceID: workspaceID, Epoch: 1, OpSeq: 9, Deploy: deploy, Dir: dir})
	if err == nil && status.GetPhase() != nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING {
		err = errors.New("it does not run: " + status.GetDetail())
	}
	_, removeErr := a.work.Remove(ctx, workspaceID, deploy.GetWorkload().GetName(), time.Millisecond)
	return errors.Join(err, removeErr)
}
