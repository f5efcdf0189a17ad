package report

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// reportedRow is a task that a report moved, with its state before.
type reportedRow struct {
	task.Record
	Was   string    `db:"was"`
	WasAt time.Time `db:"was_at"` // since when
	// LeasedAt is when the task was leased, if no event has reported that.
	LeasedAt *time.Time `db:"leased_at"`
}

// aheadRow is a task below the attempt that a report names, with the place of that report.
type aheadRow struct {
	task.Record
	Place int64 `db:"place"`
}

// latePiece is a late result, and whether it is kept as a row.
type latePiece struct {
	TaskID string `db:"task_id"`
	State  string `db:"state"`
	Kept   bool   `db:"kept"`
}

var (
	lockBehindReports = pg.Define(pg.RoleLifecycle, "report.lock_behind_reports", `
		SELECT u.place, `+task.Columns+` FROM unnest($1::uuid[], $2::uuid[], $3::int[]) WITH ORDINALITY AS u (task_id,
			node_id, attempt, place)
		JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND t.attempt < u.attempt
		ORDER BY t.task_id, u.attempt FOR UPDATE OF t`)
	adoptAttempt = pg.Define(pg.RoleLifecycle, "report.adopt_attempt", `
		UPDATE lifecycle.task t SET attempt = $2, version = t.version + 1,
			state = CASE WHEN t.open THEN 'dispatched' ELSE t.state END,
			state_at = CASE WHEN t.open AND t.state <> 'dispatched' THEN mesh.clock() ELSE t.state_at END,
			session_epoch = CASE WHEN t.open THEN $3 ELSE t.session_epoch END,
			session_id = CASE WHEN t.open THEN nullif($4, '')::uuid ELSE t.session_id END,
			offered_at = CASE WHEN t.open THEN mesh.clock() + interval '1 microsecond' ELSE t.offered_at END,
			key_id = CASE WHEN t.open THEN $6 ELSE t.key_id END
		WHERE t.task_id = $1 AND t.attempt < $2 AND t.node_id = $5 RETURNING `+task.Columns)
	lockLate = pg.Define(pg.RoleLifecycle, "report.lock_of_late_results", `
		SELECT FROM lifecycle.task WHERE task_id = ANY($1::uuid[]) ORDER BY task_id FOR UPDATE`)
	keepLateEvidence = pg.Define(pg.RoleLifecycle, "report.keep_late_evidence", `
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
		SELECT p.task_id::text AS task_id, p.state, p.nth <= $7 AS kept FROM placed p ORDER BY p.task_id, p.nth`)
	countLateResult = pg.Define(pg.RoleLifecycle, "report.count_late_result", `
		UPDATE lifecycle.task t
			SET late_evidence = t.late_evidence + 1, version = t.version + 1, `+task.MarkReported+` WHERE t.task_id = $1
			RETURNING `+task.Columns)
	lateResults = pg.Define(pg.RoleLifecycle, "report.late_results", `
		SELECT late_evidence FROM lifecycle.task WHERE task_id = $1`)
	countLateResults = pg.Define(pg.RoleLifecycle, "report.count_late_results", `
		UPDATE lifecycle.task SET late_evidence = least(late_evidence::bigint + $2, 2147483647) WHERE task_id = $1`)
	relaxCommit = pg.Define(pg.RoleLifecycle, "report.relax_commit", `
		SELECT set_config('synchronous_commit', 'off', true)`)
	applyReports = pg.Define(pg.RoleLifecycle, "report.apply_reports", `
		WITH said AS (
			SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[])
				AS u (task_id, node_id, attempt, state, note, reason, error, output)
		), held AS (
			SELECT t.task_id, t.state AS was, t.state_at AS was_at,
				CASE WHEN t.state = 'dispatched' AND t.offered_at = t.state_at THEN t.state_at END AS leased_at, u.*
			FROM said u JOIN lifecycle.node_gate g ON g.node_id = u.node_id AND `+gate.AdmittedSQL+`
				JOIN lifecycle.task t ON t.task_id = u.task_id AND t.node_id = u.node_id AND t.attempt = u.attempt
			WHERE t.state IN ('dispatched', 'delivered', 'running')
			ORDER BY t.task_id FOR UPDATE OF t
		)
		UPDATE lifecycle.task t SET
			state = CASE WHEN h.state = '' THEN t.state ELSE h.state END,
			state_at = CASE WHEN h.state = '' THEN t.state_at ELSE mesh.clock() END,
			note = CASE WHEN h.note = '' THEN t.note ELSE h.note END,
			reason = h.reason, error = h.error, output = h.output, version = t.version + 1, `+task.MarkReported+`,
			payload = `+task.PayloadAt("h.state")+`
		FROM held h(task_id, was, was_at, leased_at, u_task_id, node_id, attempt, state, note, reason, error, output)
		WHERE t.task_id = h.task_id AND (h.state = '' OR
			array_position(ARRAY['dispatched', 'delivered', 'running'], h.was) <
			coalesce(array_position(ARRAY['dispatched', 'delivered', 'running'], h.state), 9))
		RETURNING h.was, h.was_at, h.leased_at, `+task.Columns)
)
