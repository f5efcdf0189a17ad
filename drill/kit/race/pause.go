package race

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
	"github.com/gpuaas/mesh/drill/kit/host"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/drill/kit/stage"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// pauses is how often the drill tries to stop a holder: a run is parked most of the time, and a parked run loses
// nothing when its last holder stops.
const pauses = 20

// Pause races until a replica that had leased the run was stopped for longer than the lease, and another continued the
// run meanwhile.
func (x *Race) Pause(ctx context.Context) error {
	return x.repeat(ctx, pauses, "holder paused past its lease", x.paused,
		fmt.Errorf("in %d rounds no run was held by the replica that was stopped", pauses))
}

// paused stops the replica that has leased the run for longer than the run's lease, and reports whether the run's
// attempt was lost by that: another replica took the run over, as the timeline records. The kernel confirms that the
// holder was stopped the whole time.
func (x *Race) paused(ctx context.Context, run start) (bool, error) {
	c, err := x.r.Mesh.Cluster()
	if err != nil {
		return false, err
	}
	op, err := run(ctx)
	if err != nil {
		return false, err
	}
	holder, err := x.holder(ctx, c, op)
	if err != nil || holder == nil {
		return false, stage.At(stage.Injected, err)
	}
	pid := holder.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return false, stage.At(stage.Injected, err)
	}
	err = errors.Join(await.Until(ctx, "the holder to stop", await.Took,
		func(context.Context) error { return host.Stopped(pid) }),
		await.Sleep(ctx, x.pause()), host.Stopped(pid))
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT)); err != nil {
		return false, stage.At(stage.Injected, err)
	}
	resp, err := x.r.Mesh.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: x.id})
	if err != nil {
		return false, stage.At(stage.Injected, err)
	}
	for _, i := range resp.GetItems() {
		if i.GetRunId() == op.GetOperationId() && i.GetState() == commonv1.AttemptState_ATTEMPT_STATE_LOST {
			x.r.Note("%s, process %d, was stopped for %s in %q, which another replica took over", holder.Name, pid, x.pause(),
				i.GetName())
			return true, nil
		}
	}
	x.r.Note("%s, process %d, was stopped for %s and held nothing by then", holder.Name, pid, x.pause())
	return false, nil
}

// pause returns a duration longer than a lease.
func (x *Race) pause() time.Duration {
	if x.r.Mesh.Scaled {
		return mesh.ScaledLease + 2*time.Second
	}
	return 20 * time.Second
}

// holder returns the replica that has leased a run, while it has; nil: no replica had leased it while the drill
// watched.
func (x *Race) holder(ctx context.Context, c *cluster.Cluster, op *lifecyclev1.Operation) (*cluster.Process, error) {
	for began := time.Now(); time.Since(began) < time.Second; {
		resp, err := x.r.Mesh.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: x.id})
		if err != nil {
			return nil, err
		}
		for _, run := range resp.GetRuns() {
			i := slices.IndexFunc(c.Lifecycle, func(p *cluster.Process) bool { return p.Replica() == run.GetOwner() })
			if run.GetRunId() == op.GetOperationId() && i >= 0 {
				return c.Lifecycle[i], nil
			}
		}
	}
	return nil, nil
}
