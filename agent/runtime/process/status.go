package process

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// waitsForList is the detail of a workload that should run and was not started after a boot.
const waitsForList = "waits for the control plane to list its epoch as one that may run on this node"

// check returns the status of a workload, or nil if it is not deployed. It does not wait for an operation under way:
// the files are enough.
func (r *Runtime) check(ctx context.Context, w *workload) *nodev1.WorkloadStatus {
	if w.mu.TryLock() {
		defer w.mu.Unlock()
		if !w.present {
			if w.failed != "" {
				return &nodev1.WorkloadStatus{
					Name: w.key.name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_UNSPECIFIED,
					Detail: w.failed,
				}
			}
			return nil
		}
		return r.status(ctx, w)
	}
	busy := &workload{key: w.key, dir: w.dir}
	found, err := jsonfile.Read(busy.dir, fileSpec, &busy.spec)
	if err != nil || !found {
		return nil
	}
	_, _ = jsonfile.Read(busy.dir, fileDesired, &busy.want)
	return r.status(ctx, busy)
}

// status returns the status of a workload by its files, the kernel's facts about its process, and a probe.
func (r *Runtime) status(ctx context.Context, w *workload) *nodev1.WorkloadStatus {
	s := w.state()
	out := &nodev1.WorkloadStatus{
		Name: w.key.name, Restarts: s.restarted(), Detail: s.Detail, Epoch: w.spec.Epoch, GpuDeviceIds: w.spec.GPUs,
		Adopted: w.adopted || s.Adopted, Uid: int32(max(w.spec.UID, 0)), // from a range of ids
	}
	if w.spec.UID < 0 {
		out.Uid = int32(os.Getuid())
	}
	if len(w.spec.Cgroups) > 0 {
		out.Cgroup = w.spec.Cgroups[0]
	}
	if s.HasExited || s.Restarts > 0 {
		out.ExitCode = s.ExitCode
		if !s.ExitedAt.IsZero() {
			out.ExitedAt = timestamppb.New(s.ExitedAt)
		}
	}
	for _, p := range w.spec.Ports {
		out.Ports = append(out.Ports, &nodev1.Port{Name: p.Name, Port: p.Port})
	}
	if r.waits(w) {
		out.Phase, out.Detail = nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED, waitsForList
		return out
	}
	out.Phase = r.phase(w, s)
	if out.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING {
		out.Pid = int32(s.Child.PID)
		out.StartedAt = timestamppb.New(s.StartedAt)
		out.Ready, out.Detail = r.ready(ctx, w.spec, s.uptime())
	}
	if out.GetPhase() == nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED {
		out.Ready = finished(w.spec, s)
	}
	out.CrashLoop = r.loops(w, s, out.GetPhase())
	return out
}

// loops reports whether a workload exits again and again: it has been restarted as often in a row as makes a crash
// loop, each time after a short run, has exited once more, and its present run is not long enough yet to be the end of
// it.
func (r *Runtime) loops(w *workload, s state, phase nodev1.WorkloadPhase) bool {
	if !w.want.Run || s.Final || s.ShortRuns <= r.crashLoop.Load() {
		return false
	}
	return phase != nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING || s.uptime() < w.spec.calm()
}

// phase returns the phase of a workload by its shim's state and by which processes are alive.
func (r *Runtime) phase(w *workload, s state) nodev1.WorkloadPhase {
	running := s.BootID == r.boot && s.Child.Alive()
	switch {
	case running && s.Phase == phaseRunning:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_RUNNING
	case running:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING
	case s.Final || s.Phase == phaseExited && !w.want.Run:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_EXITED
	case !w.want.Run:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STOPPED
	case s.Phase == phaseBackoff || s.Phase == phaseExited || s.Phase == phaseRunning:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_BACKOFF
	default:
		return nodev1.WorkloadPhase_WORKLOAD_PHASE_STARTING
	}
}

// crashLoops is the digest of every workload in a crash loop: one that exits once more has not changed.
const crashLoops = "crash loop"

// checkAll returns the status of each workload, as check does. All are checked at once: a probe waits for its workload,
// and one that does not answer must not delay what is observed of others.
func (r *Runtime) checkAll(ctx context.Context, all []*workload) []*nodev1.WorkloadStatus {
	out := make([]*nodev1.WorkloadStatus, len(all))
	var checks sync.WaitGroup
	for i, w := range all {
		checks.Go(func() { out[i] = r.check(ctx, w) })
	}
	checks.Wait()
	return out
}

// observeChanges reports whether the status of any workload differs from that of the last call.
func (r *Runtime) observeChanges(ctx context.Context) bool {
	changed := false
	all := r.list()
	for i, st := range r.checkAll(ctx, all) {
		w := all[i]
		var digest string
		if st.GetCrashLoop() {
			digest = crashLoops
		} else if st != nil {
			digest = strings.Join([]string{
				st.GetPhase().String(), strconv.FormatBool(st.GetReady()), strconv.Itoa(int(st.GetPid())),
				strconv.Itoa(int(st.GetRestarts())),
			}, " ")
		}
		r.mu.Lock()
		if w.last != digest {
			w.last, changed = digest, true
		}
		r.mu.Unlock()
	}
	return changed
}

// Status returns one workload, or all of a workspace if name is empty. One that is not there has the phase absent.
func (r *Runtime) Status(ctx context.Context, workspaceID, name string) ([]*nodev1.WorkloadStatus, error) {
	if !validWorkspace(workspaceID) {
		return nil, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the workspace's id is malformed")
	}
	asked := slices.DeleteFunc(r.list(), func(w *workload) bool {
		return w.key.workspaceID != workspaceID || name != "" && w.key.name != name
	})
	out := slices.DeleteFunc(r.checkAll(ctx, asked), func(st *nodev1.WorkloadStatus) bool { return st == nil })
	if len(out) == 0 && name != "" {
		out = append(out, &nodev1.WorkloadStatus{Name: name, Phase: nodev1.WorkloadPhase_WORKLOAD_PHASE_ABSENT})
	}
	return out, nil
}

// Observe returns every workload of the host, by workspace, for Observation frames.
func (r *Runtime) Observe(ctx context.Context) map[string][]*nodev1.WorkloadStatus {
	out := map[string][]*nodev1.WorkloadStatus{}
	all := r.list()
	for i, st := range r.checkAll(ctx, all) {
		if w := all[i]; st != nil {
			out[w.key.workspaceID] = append(out[w.key.workspaceID], st)
		}
	}
	return out
}

// Changed returns a channel that gets a value when a workload changed its phase, pid, restarts or readiness, or entered
// or left a crash loop, since the last value was taken. Restarts within a crash loop are not changes.
func (r *Runtime) Changed() <-chan struct{} { return r.changed }

func (r *Runtime) notify() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}
