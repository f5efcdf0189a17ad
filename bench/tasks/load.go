package tasks

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// patience is how long a task may take before the bench gives up.
const patience = time.Minute

// one queues a task, whose commit is shared with those that come at the same moment, and waits for its acknowledgement
// at the agent.
func (r *cluster) one(ctx context.Context, n node) (time.Duration, error) {
	began := time.Now()
	row, _, err := r.tasks.Queue(ctx, task.Spec{
		Type: commonv1.TaskType_TASK_TYPE_PROBE_NOOP, NodeID: n.ID, IdempotencyKey: "bench/" + ids.New(),
		StartWithin: patience,
		Payload:     &nodev1.ProbeNoop{Nonce: "bench"}, CreatedBy: "bench",
	})
	if err != nil {
		return 0, fmt.Errorf("queue task: %w", err)
	}
	select {
	case at := <-r.ends.Expect(row.TaskID):
		r.done.Add(1)
		return at.Sub(began), nil
	case <-time.After(patience):
		return 0, fmt.Errorf("task %s was not acknowledged within %s", row.TaskID, patience)
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for task: %w", context.Cause(ctx))
	}
}

// load keeps a number of tasks open on every node for the length of time. It returns how long each round trip took, and
// the time until the last one ended.
func (r *cluster) load(ctx context.Context, length time.Duration) ([]time.Duration, time.Duration, error) {
	lanes := len(r.nodes) * r.opts.Outstanding
	took := make([][]time.Duration, lanes)
	began := time.Now()
	until := began.Add(length)
	var group errgroup.Group
	for i := range lanes {
		group.Go(func() error {
			for time.Now().Before(until) {
				d, err := r.one(ctx, r.nodes[i%len(r.nodes)])
				if err != nil {
					return err
				}
				took[i] = append(took[i], d)
			}
			return nil
		})
	}
	err := group.Wait()
	elapsed := time.Since(began)
	if err != nil {
		return nil, elapsed, err
	}
	return slices.Concat(took...), elapsed, nil
}

// steady queues at a fixed rate, whatever the results, and returns how long each round trip took.
func (r *cluster) steady(ctx context.Context, length time.Duration) ([]time.Duration, error) {
	n := int(length.Seconds() * float64(r.opts.Rate))
	took := make([]time.Duration, n)
	var group errgroup.Group
	tick := time.NewTicker(time.Second / time.Duration(r.opts.Rate))
	defer tick.Stop()
	for i := range n {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("keep the rate: %w", context.Cause(ctx))
		}
		group.Go(func() error {
			var err error
			took[i], err = r.one(ctx, r.nodes[i%len(r.nodes)])
			return err
		})
	}
	return took, group.Wait()
}
