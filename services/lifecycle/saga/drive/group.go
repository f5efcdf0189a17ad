package drive

import (
	"context"
	"errors"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// groupSize is how many transitions one transaction writes at most.
const groupSize = 64

// gather is how long a group waits for transitions that this driver's other runs may be about to make. A run that is
// alone never waits.
const gather = 500 * time.Microsecond

// commits writes the transitions of this driver's runs until ctx ends. Transitions that come together share a
// transaction: each commit costs a flush to disk and several round trips.
func (d *Driver) commits(ctx context.Context) {
	for {
		group := d.nextGroup(ctx)
		if len(group) == 0 {
			return
		}
		d.commit(ctx, group)
	}
}

// nextGroup waits for a transition and takes the ones that follow within gather. Only one committer gathers at a time:
// while one writes, the other gathers.
func (d *Driver) nextGroup(ctx context.Context) []*transition {
	d.gathering.Lock()
	defer d.gathering.Unlock()
	var group []*transition
	select {
	case <-ctx.Done():
		return nil
	case mv := <-d.transitions:
		group = append(group, mv)
	}
	want := min(d.leases.Len()/committers, groupSize)
	timer := time.NewTimer(gather)
	defer timer.Stop()
	for len(group) < groupSize {
		select {
		case mv := <-d.transitions:
			group = append(group, mv)
			continue
		default:
		}
		if len(group) >= want {
			return group
		}
		select {
		case mv := <-d.transitions:
			group = append(group, mv)
		case <-timer.C:
			return group
		case <-ctx.Done():
			return group
		}
	}
	return group
}

// commit writes a group. If that fails for a reason other than the connection, each transition is tried alone, so that
// a failing one does not affect the others.
func (d *Driver) commit(ctx context.Context, group []*transition) {
	err := d.write(ctx, group)
	if err != nil && len(group) > 1 && !waitable(err) && ctx.Err() == nil {
		for _, mv := range group {
			d.commit(ctx, []*transition{mv})
		}
		return
	}
	for _, mv := range group {
		if err != nil {
			mv.err = err
		}
		close(mv.done)
	}
}

// submit writes one transition and applies it to the driver's copy of the run. A transition with rows of the step's own
// has a transaction of its own.
func (d *Driver) submit(ctx context.Context, mv *transition) error {
	mv.done = make(chan struct{})
	if !mv.rows().Empty() {
		d.commit(ctx, []*transition{mv})
	} else {
		select {
		case d.transitions <- mv:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		select {
		case <-mv.done:
		case <-ctx.Done():
			return errors.Join(pg.ErrCommitUnknown, context.Cause(ctx))
		}
	}
	from := mv.h.Place()
	if mv.err != nil {
		if errors.Is(mv.err, errCancelPending) {
			mv.h.Run = mv.runNow
		}
		return mv.err
	}
	if mv.attempt != nil {
		d.core.Stats().Advanced.Add(1)
		if mv.cl.state == runs.AttemptSucceeded && mv.h.Run.Phase == runs.Do && len(mv.cl.output) > 0 {
			mv.h.Outputs[mv.h.Attempt.Name] = mv.cl.output
		}
		mv.h.Run, mv.h.Attempt, mv.h.RunLeft, mv.h.Overdue = mv.to.Run, mv.to.Attempt, mv.to.RunLeft, mv.to.Overdue
		mv.h.Paused, mv.h.Stage = mv.to.Paused, mv.to.Stage
	}
	return d.core.Point(ctx, mv.point()+".after_commit", from)
}
