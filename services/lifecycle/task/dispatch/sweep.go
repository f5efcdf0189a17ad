package dispatch

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// Swept counts what one sweep ended.
type Swept struct {
	Expired int
	Unknown int
}

// undeliveredFor is how long past its last moment to start a task may stay dispatched at a connected node: its delivery
// may be on the way.
const undeliveredFor = "1 minute"

// sweepBatch bounds the tasks of one transaction.
const sweepBatch = 500

// Sweep ends tasks whose last moment to start has passed: the queued ones as expired; those on their way or running at
// a node that has no session as outcome_unknown. A task that runs at a connected node is left to its step's deadline;
// one that a connected node has not stored is not offered again, and ends after undeliveredFor. In rollback mode Sweep
// ends only tasks of the types that are dispatched in it (see dispatchable), and it ends no task of a paused run. Sweep
// also clears the payloads of tasks that an earlier build ended, and appends events for leases that no event has
// reported yet. Tasks that have ended are history.
func (s *Server) Sweep(ctx context.Context) (Swept, error) {
	var total Swept
	for {
		n, err := s.sweepOnce(ctx, &total)
		if err != nil {
			return total, fmt.Errorf("sweep stale tasks: %w", err)
		}
		if n < sweepBatch {
			_, err := s.clearPayloads(ctx)
			return total, err
		}
	}
}

func (s *Server) sweepOnce(ctx context.Context, total *Swept) (int, error) {
	var list []ended
	reported := 0
	err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if reported, err = task.ReportLeases(ctx, tx, sweepBatch); err != nil {
			return err
		}
		if list, err = end(ctx, tx); err != nil {
			return fmt.Errorf("end stale tasks: %w", err)
		}
		if len(list) == 0 {
			return nil
		}
		evs := make([]events.Event, 0, len(list))
		var wake []string
		for _, r := range list {
			evs = append(evs, r.Event(r.transitions()...))
			if r.RunID != "" {
				wake = append(wake, r.RunID)
			}
		}
		began, err := backlogBegan(ctx, tx, list)
		if err != nil {
			return err
		}
		if _, err := events.Append(ctx, tx, append(evs, began...)...); err != nil {
			return fmt.Errorf("report tasks: %w", err)
		}
		if len(wake) > 0 {
			slices.Sort(wake)
			return s.deps.Wake(ctx, tx, slices.Compact(wake)...)
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	if reported+len(list) > 0 {
		s.deps.Committed()
	}
	for _, r := range list {
		if r.State == commonv1.TaskState_TASK_STATE_EXPIRED {
			total.Expired++
		} else {
			total.Unknown++
		}
	}
	return max(reported, len(list)), nil
}

// ended is a task that the sweep has ended.
type ended struct {
	task.Row
	leasedAt *time.Time // when it was leased, if no event has reported that
}

// end ends stale tasks.
func end(ctx context.Context, tx pgx.Tx) ([]ended, error) {
	rows, err := pg.All[staleRow](ctx, tx, endStale, sweepBatch)
	if err != nil {
		return nil, err
	}
	id := func(r staleRow) string { return r.TaskID }
	return aside.Rows(ctx, "task", rows, id, func(r staleRow) (ended, error) {
		row, err := r.Parse(ctx)
		return ended{Row: row, leasedAt: r.LeasedAt}, err
	})
}

// transitions lists the lease, if no event has reported it, and the end.
func (e ended) transitions() []*lifecyclev1.TaskTransition {
	last := e.Transition(e.State, "")
	if e.leasedAt == nil {
		return []*lifecyclev1.TaskTransition{last}
	}
	return []*lifecyclev1.TaskTransition{e.Leased(*e.leasedAt), last}
}

// clearBatches bounds the batches that one sweep clears: a database of an earlier build, which kept all payloads, is
// cleared over many sweeps, and none of them delays the end of stale tasks for long.
const clearBatches = 10

// clearPayloads clears the payloads of tasks that an earlier build ended, in batches, and returns how many it cleared.
// In rollback mode it clears none.
func (s *Server) clearPayloads(ctx context.Context) (int, error) {
	total := 0
	for range clearBatches {
		n := 0
		err := pg.InTx(ctx, s.deps.DB, func(ctx context.Context, tx pgx.Tx) error {
			tag, err := pg.Exec(ctx, tx, clearPayloads, sweepBatch)
			n = int(tag.RowsAffected())
			return err
		})
		total += n
		if err != nil {
			return total, fmt.Errorf("clear payloads of ended tasks: %w", err)
		}
		if n < sweepBatch {
			break
		}
	}
	return total, nil
}
