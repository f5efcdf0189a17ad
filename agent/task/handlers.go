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
	// NoRoom is called with every error for want of room; nil: errors are not passed on.
	NoRoom func(error)
}

// adds returns run for tasks that need more disk space: they fail with the error of Room if the host has none.
func (d HandlerDeps) adds(run HandlerFunc) HandlerFunc {
	return d.within(func(ctx context.Context, t *Task, p Progress) (proto.Message, error) {
		if d.Room != nil {
			if err := d.Room(); err != nil {
				return nil, err
			}
		}
		return run(ctx, t, p)
	})
}

// within returns run with errors for want of room passed to NoRoom and given their reason.
func (d HandlerDeps) within(run HandlerFunc) HandlerFunc {
	return func(ctx context.Context, t *Task, p Progress) (proto.Message, error) {
		out, err := run(ctx, t, p)
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

// Handlers returns the handlers of probes, storage, workloads and diagnostics. All of them have the same effect the
// second time, so after a restart of the agent they run again, with one exception: a workload's restart that had begun
// is observed, since the workload might be restarted twice.
func Handlers(d HandlerDeps) map[commonv1.TaskType]Handler {
	if d.Now == nil {
		d.Now = time.Now
	}
	return map[commonv1.TaskType]Handler{
		commonv1.TaskType_TASK_TYPE_PROBE_NOOP:          again{d.noop},
		commonv1.TaskType_TASK_TYPE_DIAGNOSTICS_COLLECT: again{d.diagnostics},
		commonv1.TaskType_TASK_TYPE_STORAGE_ALLOCATE:    again{d.adds(d.allocate)},
		commonv1.TaskType_TASK_TYPE_STORAGE_RELEASE:     again{d.within(d.release)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY:     again{d.adds(d.deploy)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_START:      again{d.within(d.start)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_STOP:       again{d.within(d.stop)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_REMOVE:     again{d.within(d.remove)},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_STATUS:     again{d.status},
		commonv1.TaskType_TASK_TYPE_WORKLOAD_RESTART:    restartHandler{d},
	}
}

// payload decodes a task's payload.
func payload(t *Task, into proto.Message) error {
	if err := proto.Unmarshal(t.Payload, into); err != nil {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, fmt.Sprintf("the payload is no message for %s", t.Type),
			fault.Cause(err))
	}
	return nil
}

func (d HandlerDeps) noop(_ context.Context, t *Task, _ Progress) (proto.Message, error) {
	var in nodev1.ProbeNoop
	if err := payload(t, &in); err != nil {
		return nil, err
	}
	return &nodev1.ProbeNoopOutput{Nonce: in.GetNonce(), AgentTime: timestamppb.New(d.Now()), BootId: d.BootID}, nil
}

func (d HandlerDeps) diagnostics(_ context.Context, t *Task, _ Progress) (proto.Message, error) {
	var in nodev1.DiagnosticsCollect
	if err := payload(t, &in); err != nil {
		return nil, err
	}
	return &nodev1.DiagnosticReport{Diagnostics: d.Diagnostics.Since(time.Time{}, int(in.GetMaxRecords()))}, nil
}

func (d HandlerDeps) allocate(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	var in nodev1.StorageAllocate
	if err := payload(t, &in); err != nil {
		return nil, err
	}
	out, err := d.Storage.Allocate(ctx, t.WorkspaceID, in.GetName(), in.GetSizeBytes())
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (d HandlerDeps) release(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	var in nodev1.StorageRelease
	if err := payload(t, &in); err != nil {
		return nil, err
	}
	existed, err := d.Storage.Release(ctx, t.WorkspaceID, in.GetName())
	if err != nil {
		return nil, err
	}
	return &nodev1.StorageReleaseOutput{Existed: existed}, nil
}

func (d HandlerDeps) deploy(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	var in nodev1.WorkloadDeploy
	if err := payload(t, &in); err != nil {
		return nil, err
	}
	req := process.Request{WorkspaceID: t.WorkspaceID, Epoch: t.Epoch, OpSeq: t.OpSeq, Deploy: &in}
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

func ref(t *Task) (*nodev1.WorkloadRef, error) {
	in := &nodev1.WorkloadRef{}
	return in, payload(t, in)
}

func (d HandlerDeps) start(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
	return one(d.Runtime.Start(ctx, t.WorkspaceID, in.GetName()))
}

func (d HandlerDeps) stop(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
	return one(d.Runtime.Stop(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
}

func (d HandlerDeps) remove(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
	return one(d.Runtime.Remove(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
}

// allWorkloads as a name means every workload of the workspace. No workload can have this name.
const allWorkloads = "*"

func (d HandlerDeps) status(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
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

// restartHandler restarts a workload once.
type restartHandler struct{ HandlerDeps }

func (h restartHandler) Run(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
	return h.within(func(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
		return one(h.Runtime.Restart(ctx, t.WorkspaceID, in.GetName(), in.GetGrace().AsDuration()))
	})(ctx, t, nil)
}

// Observe starts the workload if it does not run: the task asked for a running workload, and the handler cannot find
// out whether it was stopped already.
func (h restartHandler) Observe(ctx context.Context, t *Task, _ Progress) (proto.Message, error) {
	in, err := ref(t)
	if err != nil {
		return nil, err
	}
	return one(h.Runtime.Start(ctx, t.WorkspaceID, in.GetName()))
}
