package task

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/names"
)

// maxLateEvidence is how many late results of one task are kept as rows, each with an event. Further ones are only
// counted in the task's row: what a node reports of one task must not grow the database without bound.
const maxLateEvidence = 8

// keepLate keeps results that change nothing any more. A result that was applied before, and whose acknowledgement was
// lost, is not evidence of anything new and is left out; so is one of an attempt above the row's, which nothing proves.
func keepLate(ctx context.Context, tx pgx.Tx, words []word) error {
	if len(words) == 0 {
		return nil
	}
	n := len(words)
	taskIDs, nodes, states, details := make([]string, n), make([]string, n), make([]string, n), make([]string, n)
	attempts, epochs := make([]int32, n), make([]int64, n)
	for i, w := range words {
		taskIDs[i], nodes[i], attempts[i], epochs[i] = w.ref.GetTaskId(), w.node, w.ref.GetAttempt(), w.epoch
		states[i], details[i] = names.Of(w.state()), clean(w.result.GetError(), 4096)
	}
	// The rows are locked before the evidence is counted, so that concurrent reports do not pass the limit together.
	if _, err := tx.Exec(ctx, `SELECT FROM lifecycle.task WHERE task_id = ANY($1::uuid[]) ORDER BY task_id FOR UPDATE`, taskIDs); err != nil {
		return fmt.Errorf("lock tasks of late results: %w", err)
	}
	rows, err := tx.Query(ctx, `
		WITH late AS (
			SELECT DISTINCT ON (u.task_id, u.attempt, u.session_epoch, u.state) u.*
			FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::text[]) WITH ORDINALITY
				AS u (task_id, node_id, attempt, session_epoch, state, detail, place)
			JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND u.attempt <= t.attempt
			WHERE NOT (t.attempt = u.attempt AND t.state = u.state) AND NOT EXISTS (
				SELECT FROM lifecycle.late_evidence e
				WHERE e.task_id = u.task_id AND e.attempt = u.attempt AND e.session_epoch = u.session_epoch AND e.state = u.state)
			ORDER BY u.task_id, u.attempt, u.session_epoch, u.state, u.place
		), placed AS (
			SELECT l.*, row_number() OVER (PARTITION BY l.task_id ORDER BY l.place) +
				(SELECT count(*) FROM lifecycle.late_evidence e WHERE e.task_id = l.task_id) AS nth
			FROM late l
		), kept AS (
			INSERT INTO lifecycle.late_evidence (task_id, attempt, node_id, session_epoch, state, detail)
			SELECT p.task_id, p.attempt, p.node_id, p.session_epoch, p.state, p.detail FROM placed p WHERE p.nth <= $7
		)
		SELECT p.task_id::text, p.state, p.nth <= $7 FROM placed p ORDER BY p.task_id, p.nth`,
		taskIDs, nodes, attempts, epochs, states, details, maxLateEvidence)
	if err != nil {
		return fmt.Errorf("keep late evidence: %w", err)
	}
	type piece struct {
		TaskID string
		State  string
		Kept   bool
	}
	pieces, err := pgx.CollectRows(rows, pgx.RowToStructByPos[piece])
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
	r, err := scan(tx.QueryRow(ctx, `
		UPDATE lifecycle.task t SET late_evidence = t.late_evidence + 1, version = t.version + 1 WHERE t.task_id = $1 RETURNING `+columns, taskID))
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	if _, err := events.Append(ctx, tx, r.event(r.transition(r.State, detail))); err != nil {
		return fmt.Errorf("report task: %w", err)
	}
	return nil
}

// countMore counts late results past the limit. Only the first of them is an event: it says that nothing more will be
// reported of them.
func countMore(ctx context.Context, tx pgx.Tx, taskID string, more int32) error {
	var total int32
	err := tx.QueryRow(ctx, `SELECT late_evidence FROM lifecycle.task WHERE task_id = $1`, taskID).Scan(&total)
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	if total <= maxLateEvidence {
		if err := countLate(ctx, tx, taskID, fmt.Sprintf("more than %d results came late: further ones are only counted", maxLateEvidence)); err != nil {
			return err
		}
		more--
	}
	if more == 0 {
		return nil
	}
	_, err = tx.Exec(ctx, `UPDATE lifecycle.task SET late_evidence = least(late_evidence::bigint + $2, 2147483647) WHERE task_id = $1`, taskID, more)
	if err != nil {
		return fmt.Errorf("count late evidence: %w", err)
	}
	return nil
}
