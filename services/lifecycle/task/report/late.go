package report

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// maxLateEvidence is how many late results of one task are kept as rows, each with an event. Further ones are only
// counted in the task's row, so that a node's reports of one task do not grow the database without bound.
const maxLateEvidence = 8

// keepLate keeps results that came too late to change their tasks. It leaves out a result that was applied before,
// whose acknowledgement was lost, and an unproven result of an attempt above the row's.
func keepLate(ctx context.Context, tx pgx.Tx, updates []taskUpdate) error {
	if len(updates) == 0 {
		return nil
	}
	n := len(updates)
	taskIDs, nodes, states, details := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	attempts, epochs := make([]int32, n), make([]int64, n)
	for i, w := range updates {
		taskIDs[i], nodes[i], attempts[i], epochs[i] = w.ref.GetTaskId(), w.node, w.ref.GetAttempt(), w.epoch
		states[i], details[i] = names.Of(w.state()), task.Clean(w.result.GetError(), 4096)
	}
	// The rows are locked before the evidence is counted, so that concurrent reports do not pass the limit together.
	if _, err := pg.Exec(ctx, tx, lockLate, taskIDs); err != nil {
		return fmt.Errorf("lock tasks of late results: %w", err)
	}
	pieces, err := pg.All[latePiece](ctx, tx, keepLateEvidence,
		taskIDs, nodes, attempts, epochs, states, details, maxLateEvidence)
	if err != nil {
		return fmt.Errorf("keep late evidence: %w", err)
	}
	counted := map[string]int32{}
	var order []string
	for _, p := range pieces {
		if !p.Kept {
			if counted[p.TaskID] == 0 {
				order = append(order, p.TaskID)
			}
			counted[p.TaskID]++
			continue
		}
		if err := countLate(ctx, tx, p.TaskID, "a result came late: "+p.State); err != nil {
			return err
		}
	}
	for _, taskID := range order {
		if err := countMore(ctx, tx, taskID, counted[taskID]); err != nil {
			return err
		}
	}
	return nil
}

// countLate counts one late result of a task and reports it.
func countLate(ctx context.Context, tx pgx.Tx, taskID, detail string) error {
	r, err := task.One(ctx, tx, countLateResult, taskID)
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	if _, err := events.Append(ctx, tx, r.Event(r.Transition(r.State, detail))); err != nil {
		return fmt.Errorf("report task: %w", err)
	}
	return nil
}

// countMore counts late results past the limit. Only the first of them is an event, with the text that further ones are
// only counted.
func countMore(ctx context.Context, tx pgx.Tx, taskID string, more int32) error {
	total, err := pg.Value[int32](ctx, tx, lateResults, taskID)
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	if total <= maxLateEvidence {
		if err := countLate(ctx, tx, taskID,
			fmt.Sprintf("more than %d results came late: further ones are only counted", maxLateEvidence)); err != nil {
			return err
		}
		more--
	}
	if more == 0 {
		return nil
	}
	_, err = pg.Exec(ctx, tx, countLateResults, taskID, more)
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	return nil
}
