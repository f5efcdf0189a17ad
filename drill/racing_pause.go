package drill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// holds is how often the drill tries to stop a holder: a run is parked most of the time, and a parked run loses nothing
// when its last holder stops.
const holds = 20

// hold races until a replica that had leased the run was stopped for longer than the lease, and another continued the
// run meanwhile.
func (x *race) hold(ctx context.Context) error {
	for range holds {
		lost := false
		err := x.round(ctx, "holder paused past its lease",
			func(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) error {
				var err error
				lost, err = x.paused(ctx, run)
				return err
			})
		if err != nil || lost {
			return err
		}
	}
	return at(StageInjected, fmt.Errorf("in %d rounds no run was held by the replica that was stopped", holds))
}

// paused stops the replica that has leased the run for longer than the run's lease, and reports whether the run's
// attempt was lost by that: another replica took the run over, as the timeline records. The kernel confirms that the
// holder was stopped the whole time.
func (x *race) paused(ctx context.Context, run func(context.Context) (*lifecyclev1.Operation, error)) (bool, error) {
	c, err := x.r.Mesh.own()
	if err != nil {
		return false, err
	}
	op, err := run(ctx)
	if err != nil {
		return false, err
	}
	holder, err := x.holder(ctx, c, op)
	if err != nil || holder == nil {
		return false, at(StageInjected, err)
	}
	pid := holder.PID()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return false, at(StageInjected, err)
	}
	err = errors.Join(await(ctx, "the holder to stop", took, func(context.Context) error { return stopped(pid) }),
		wait(ctx, x.pause()), stopped(pid))
	if err = errors.Join(err, syscall.Kill(pid, syscall.SIGCONT)); err != nil {
		return false, at(StageInjected, err)
	}
	resp, err := x.r.Mesh.Client.Query.GetTimeline(ctx, &readmodelv1.GetTimelineRequest{Workspace: x.id})
	if err != nil {
		return false, at(StageInjected, err)
	}
	for _, i := range resp.GetItems() {
		if i.GetRunId() == op.GetOperationId() && i.GetState() == commonv1.AttemptState_ATTEMPT_STATE_LOST {
			x.r.note("%s, process %d, was stopped for %s in %q, which another replica took over", holder.Name, pid, x.pause(),
				i.GetName())
			return true, nil
		}
	}
	x.r.note("%s, process %d, was stopped for %s and held nothing by then", holder.Name, pid, x.pause())
	return false, nil
}

// pause returns a duration longer than a lease.
func (x *race) pause() time.Duration {
	if x.r.Mesh.Scaled {
		return scaledLease + 2*time.Second
	}
	return 20 * time.Second
}

// holder returns the replica that has leased a run, while it has; nil: no replica had leased it while the drill
// watched.
func (x *race) holder(ctx context.Context, c *cluster.Cluster, op *lifecyclev1.Operation) (*cluster.Process, error) {
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
