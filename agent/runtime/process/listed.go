package process

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/internal/app"
)

// WorkspaceEpoch names one epoch of a workspace.
type WorkspaceEpoch struct {
	WorkspaceID string
	Epoch       int64
}

// SetRunList sets which epochs may be started on this host, in place of any earlier list. Until the first list no
// workload is started that does not run already. A workload that runs may be restarted, listed or not, and a task that
// starts one needs no list: R5, and the task is signed for its epoch.
func (r *Runtime) SetRunList(list []WorkspaceEpoch) {
	listed := make(map[WorkspaceEpoch]bool, len(list))
	for _, e := range list {
		listed[e] = true
	}
	r.setListed(func(e WorkspaceEpoch) bool { return listed[e] })
}

// SetRunAll allows every deployed epoch to be started: the control plane has admitted this host and is of a version
// that sends no list.
func (r *Runtime) SetRunAll() { r.setListed(func(WorkspaceEpoch) bool { return true }) }

func (r *Runtime) setListed(listed func(WorkspaceEpoch) bool) {
	for _, w := range r.list() {
		w.mayStart.Store(r.lives(w))
	}
	r.mu.Lock()
	r.listed = listed
	r.mu.Unlock()
}

// Listed reports whether the control plane has listed what may run on this host since the runtime was made.
func (r *Runtime) Listed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.listed != nil
}

// MayRun reports whether the last list has an epoch; false before the first one.
func (r *Runtime) MayRun(workspaceID string, epoch int64) bool {
	r.mu.Lock()
	listed := r.listed
	r.mu.Unlock()
	return listed != nil && listed(WorkspaceEpoch{workspaceID, epoch})
}

// mayStart reports whether a workload that does not run may be started without a task. The caller holds w.mu.
func (r *Runtime) mayStart(w *workload) bool {
	return w.mayStart.Load() || r.MayRun(w.key.workspaceID, w.spec.Epoch)
}

// waits reports whether a workload should run, does not run, and waits for its epoch to be listed.
func (r *Runtime) waits(w *workload) bool {
	s := w.state()
	return w.present && w.failed == "" && w.want.Run && !s.Final && !r.runs(s) && !r.mayStart(w)
}

// runs reports whether a shim or the first process of the workload is alive.
func (r *Runtime) runs(s state) bool {
	return s.BootID == r.boot && (s.Shim.Alive() || s.Child.Alive())
}

// haltRetry is the time between two attempts to stop workloads that did not stop.
const haltRetry = 2 * time.Second

// StopAll stops every workload with all of its processes, and returns nil when none of them runs, or an error when ctx
// ends. Run does not start them again.
func (r *Runtime) StopAll(ctx context.Context, grace time.Duration) error {
	for {
		err := r.stopAllOnce(ctx, grace)
		if err == nil || ctx.Err() != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		r.deps.Logger.LogAttrs(ctx, slog.LevelError, "workloads not stopped, trying again", slog.Any("error", err))
		app.Sleep(ctx, haltRetry)
	}
}

func (r *Runtime) stopAllOnce(ctx context.Context, grace time.Duration) error {
	all := r.list()
	problems := make([]error, len(all))
	var stopping sync.WaitGroup
	for i, w := range all {
		stopping.Go(func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			problems[i] = r.haltForGood(ctx, w, grace)
		})
	}
	stopping.Wait()
	return errors.Join(problems...)
}

// haltForGood stops a workload that is not to be started again while this process lives. On a full disk, where the
// order to stop cannot be written, it stops the workload without it: a replaced instance must not run on until there is
// room, and after a start of the agent a workload that does not run waits to be listed. The caller holds w.mu.
func (r *Runtime) haltForGood(ctx context.Context, w *workload, grace time.Duration) error {
	err := r.halt(ctx, w, grace)
	if !room.IsFull(err) {
		return err
	}
	if err := r.end(ctx, w, grace); err != nil {
		return err
	}
	w.want.Run = false
	return nil
}
