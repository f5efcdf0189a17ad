package tasks

import (
	"context"
	"fmt"
	"sync"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// patience is how long a task may take before the bench gives up.
const patience = time.Minute

// acknowledged ends the trip of a task. The acknowledgement may come before the enqueue's own goroutine has recorded
// its id.
func (r *cluster) acknowledged(id string, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t := r.waiting[id]; t != nil {
		delete(r.waiting, id)
		t.ended <- at
		r.done.Add(1)
		return
	}
	if r.early == nil {
		r.early = map[string]time.Time{}
	}
	r.early[id] = at
}

func (r *cluster) expect(id string, began time.Time) *trip {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := &trip{began: began, ended: make(chan time.Time, 1)}
	if at, ok := r.early[id]; ok {
		delete(r.early, id)
		t.ended <- at
		r.done.Add(1)
		return t
	}
	r.waiting[id] = t
	return t
}

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
	t := r.expect(row.TaskID, began)
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case at := <-t.ended:
		return at.Sub(began), nil
	case <-timer.C:
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
	errs := make(chan error, lanes)
	began := time.Now()
	until := began.Add(length)
	var wg sync.WaitGroup
	for i := range lanes {
		wg.Go(func() {
			for time.Now().Before(until) {
				d, err := r.one(ctx, r.nodes[i%len(r.nodes)])
				if err != nil {
					errs <- err
					return
				}
				took[i] = append(took[i], d)
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	select {
	case err := <-errs:
		return nil, elapsed, err
	default:
	}
	var all []time.Duration
	for _, t := range took {
		all = append(all, t...)
	}
	return all, elapsed, nil
}

// steady queues at a fixed rate, whatever the results, and returns how long each round trip took.
func (r *cluster) steady(ctx context.Context, length time.Duration) ([]time.Duration, error) {
	n := int(length.Seconds() * float64(r.opts.Rate))
	took := make([]time.Duration, n)
	errs := make(chan error, n)
	var wg sync.WaitGroup
	tick := time.NewTicker(time.Second / time.Duration(r.opts.Rate))
	defer tick.Stop()
	for i := range n {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("keep the rate: %w", context.Cause(ctx))
		}
		wg.Go(func() {
			var err error
			if took[i], err = r.one(ctx, r.nodes[i%len(r.nodes)]); err != nil {
				errs <- err
			}
		})
	}
	wg.Wait()
	select {
	case err := <-errs:
		return nil, err
	default:
		return took, nil
	}
}
