package task

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/agent/runtime/process"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Runtime runs workloads.
type Runtime interface {
	Deploy(ctx context.Context, req process.Request) (*nodev1.WorkloadStatus, error)
	Start(ctx context.Context, workspaceID, name string) (*nodev1.WorkloadStatus, error)
	Stop(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus, error)
	Restart(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus, error)
	Remove(ctx context.Context, workspaceID, name string, grace time.Duration) (*nodev1.WorkloadStatus, error)
	Status(ctx context.Context, workspaceID, name string) ([]*nodev1.WorkloadStatus, error)
	LastOutput(ctx context.Context, workspaceID, name string) string
}

// Storage keeps workspaces' data.
type Storage interface {
	Allocate(ctx context.Context, workspaceID, name string, limit int64) (*nodev1.StorageAllocateOutput, error)
	Release(ctx context.Context, workspaceID, name string) (bool, error)
	Path(workspaceID, name string) (string, bool, error)
}

// Diagnostics is the host's diagnostic record.
type Diagnostics interface {
	Since(t time.Time, limit int) []*commonv1.Diagnostic
}

// HandlerDeps are what the handlers of this package need.
type HandlerDeps struct {
	Runtime     Runtime
	Storage     Storage
	Diagnostics Diagnostics
	BootID      string
	Now         func() time.Time // the host's clock; nil means time.Now
	// Room returns an error if the host has no room for more, else nil. A nil function means that there is always room.
	Room func() error
	// MayRun reports whether the control plane's last list of what may run on this node has an epoch of a workspace. A nil
	// function means that every epoch may run.
	MayRun func(workspaceID string, epoch int64) bool
	// NoRoom is called with every error for want of room; nil: errors are not passed on.
	NoRoom func(error)
}

// Handlers returns the handlers of probes, storage, workloads and diagnostics. All of them have the same effect the
// second time, so after a restart of the agent they run again, with one exception: a workload's restart that had begun
// is observed, since the workload might be restarted twice. Those that start a workload do so after a restart only if
// its epoch may still run here.
func Handlers(d HandlerDeps) map[commonv1.TaskType]Handler {
	if d.Now == nil {
		d.Now = time.Now
	}
	return map[commonv1.TaskType]Handler{
		commonv1.TaskType_TASK_TYPE_PROBE_NOOP:          again{of(d, d.noop)},
		commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT: again{of(d, d.diagnostics)},
		commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE:    again{of(d, adds(d, d.allocate))},
		commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE:     again{of(d, d.release)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY:     again{of(d, starts(d, adds(d, d.deploy)))},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_START:      again{of(d, starts(d, d.start))},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP:       again{of(d, d.stop)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE:     again{of(d, d.remove)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS:     again{of(d, d.status)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART:    restartHandler{of(d, d.restart), of(d, starts(d, d.start))},
	}
}

// of returns a handler of tasks whose payload is an In. Errors for want of room are passed to NoRoom and given their
// reason.
func of[In any, Message interface {
	*In
	proto.Message
}](d HandlerDeps, run func(ctx context.Context, t *Task, in Message) (proto.Message, error),
) HandlerFunc {
	return func(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
		in := Message(new(In))
		if err := proto.Unmarshal(t.Payload, in); err != nil {
			return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT,
				fmt.Sprintf("the payload is no message for %s", t.Type), fault.Cause(err))
		}
		out, err := run(ctx, t, in)
		if !room.IsFull(err) {
			return out, err
		}
		if d.NoRoom != nil {
			d.NoRoom(err)
		}
		if d.Room != nil {
			if full := d.Room(); full != nil {
				return out, full
			}
		}
		return out, fault.New(commonv1.Reason_REASON_NODE_DISK_FULL, "", fault.Cause(err))
	}
}

// adds returns run for tasks that need more disk space: they fail with the error of Room if the host has none.
func adds[Message proto.Message](d HandlerDeps, run func(context.Context, *Task, Message) (proto.Message, error),
) func(context.Context, *Task, Message) (proto.Message, error) {
	return func(ctx context.Context, t *Task, in Message) (proto.Message, error) {
		if d.Room != nil {
			if err := d.Room(); err != nil {
				return nil, err
			}
		}
		return run(ctx, t, in)
	}
}

// starts returns run for tasks that start a workload. One that had begun before the agent started is not run again if
// its epoch is not among those that may run here: the workspace may run on another machine by now.
func starts[Message proto.Message](d HandlerDeps, run func(context.Context, *Task, Message) (proto.Message, error),
) func(context.Context, *Task, Message) (proto.Message, error) {
	return func(ctx context.Context, t *Task, in Message) (proto.Message, error) {
		if t.Resumed && d.MayRun != nil && !d.MayRun(t.WorkspaceID, t.Epoch) {
			return nil, fmt.Errorf("epoch %d of the workspace may not run on this node any more: %w", t.Epoch, ErrUnknown)
		}
		return run(ctx, t, in)
	}
}

func (d HandlerDeps) noop(_ context.Context, _ *Task, in *nodev1.ProbeNoop) (proto.Message, error) {
	return &nodev1.ProbeNoopOutput{Nonce: in.GetNonce(), AgentTime: timestamppb.New(d.Now()), BootId: d.BootID}, nil
}

func (d HandlerDeps) diagnostics(_ context.Context, _ *Task, in *nodev1.DiagnosticsCollect) (proto.Message, error) {
	return &nodev1.DiagnosticReport{Diagnostics: d.Diagnostics.Since(time.Time{}, int(in.GetMaxRecords()))}, nil
}

func (d HandlerDeps) allocate(ctx context.Context, t *Task, in *nodev1.StorageAllocate) (proto.Message, error) {
	out, err := d.Storage.Allocate(ctx, t.WorkspaceID, in.GetName(), in.GetSizeBytes())
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (d HandlerDeps) release(ctx context.Context, t *Task, in *nodev1.StorageRelease) (proto.Message, error) {
	existed, err := d.Storage.Release(ctx, t.WorkspaceID, in.GetName())
	if err != nil {
		return nil, err
	}
	return &nodev1.StorageReleaseOutput{Existed: existed}, nil
}

func (d HandlerDeps) deploy(ctx context.Context, t *Task, in *nodev1.WorkloadDeploy) (proto.Message, error) {
	req := process.Request{WorkspaceID: t.WorkspaceID, Epoch: t.Epoch, OpSeq: t.OpSeq, Deploy: in}
	if name := in.GetStorageName(); name != "" {
		dir, found, err := d.Storage.Path(t.WorkspaceID, name)
		if err != nil {
			return nil, err
		}
		if !found {
			return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
				"the workload's storage is not allocated on this node",
				fault.Unmet(fmt.Sprintf("storage %q is not allocated", name)))
		}
		req.Dir = dir
	}
	return one(d.Runtime.Deploy(ctx, req))
}

// one returns a status as the output of a workload task.
func one(st *nodev1.WorkloadStatus, err error) (proto.Message, error) {
	if err != nil {
		return nil, err
	}
	return &nodev1.WorkloadStatusOutput{Workloads: []*nodev1.WorkloadStatus{st}}, nil
}

func (d HandlerDeps) start(ctx context.Context, t *Task, in *nodev1.WorkloadRef) (proto.Message, error) {
	return one(d.Runtime.Start(ctx, t.WorkspaceID, in.GetName()))
}

func (d HandlerDeps) stop(ctx context.Context, t *Task, in *nodev1.WorkloadRef) (proto.Message, error) {
	return one(d.Runtime.Stop(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
}

func (d HandlerDeps) restart(ctx context.Context, t *Task, in *nodev1.WorkloadRef) (proto.Message, error) {
	return one(d.Runtime.Restart(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
}

func (d HandlerDeps) remove(ctx context.Context, t *Task, in *nodev1.WorkloadRef) (proto.Message, error) {
	return one(d.Runtime.Remove(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
}

// allWorkloads as a name means every workload of the workspace. No workload can have this name.
const allWorkloads = "*"

func (d HandlerDeps) status(ctx context.Context, t *Task, in *nodev1.WorkloadRef) (proto.Message, error) {
	name := in.GetName()
	if name == allWorkloads {
		name = ""
	}
	all, err := d.Runtime.Status(ctx, t.WorkspaceID, name)
	if err != nil {
		return nil, err
	}
	for _, st := range all {
		if in.GetLastOutput() && !st.GetReady() {
			st.LastOutput = d.Runtime.LastOutput(ctx, t.WorkspaceID, st.GetName())
		}
	}
	return &nodev1.WorkloadStatusOutput{Workloads: all}, nil
}

// restartHandler restarts a workload once. Its Observe starts the workload if it does not run: the task asked for a
// running workload, and the handler cannot find out whether it was stopped already.
type restartHandler struct {
	HandlerFunc
	observe HandlerFunc
}

// Observe calls h.observe.
func (h restartHandler) Observe(ctx context.Context, t *Task, p Progress) (proto.Message, error) {
	return h.observe(ctx, t, p)
}
