package dispatch

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// leasedRow is a task that was leased.
type leasedRow struct {
	task.Record
	Payload []byte `db:"payload"`
	Report  bool   `db:"report"` // an event is due
	KeyID   string `db:"key_id"`
}

// cancelRow is a task in flight that is to stop.
type cancelRow struct {
	NodeID  string `db:"node_id" expr:"@.node_id::text"`
	TaskID  string `db:"task_id" expr:"@.task_id::text"`
	Attempt int32  `db:"attempt"`
	Epoch   int64  `db:"epoch"`
	Reason  string `db:"cancel_reason"`
}

// waitingNode is a node with open tasks, and whether they may be leased: 0 none, 1 some later without an event, such as
// those that wait for the end of a cordon, 2 some now.
type waitingNode struct {
	NodeID string `db:"node_id"`
	Work   int    `db:"work"`
}

var (
	leaseTasks = pg.Define(pg.RoleLifecycle, "dispatch.lease", `
		WITH asked AS (
			SELECT a.*, `+gate.DiagnosisOnlySQL+` AS diagnosis_only
			FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::int[]) AS a (node_id, session_id, generation, most)
				JOIN lifecycle.node_gate g ON g.node_id = a.node_id AND `+gate.MayLeaseSQL("a.generation", "$5::text")+`
		), fresh AS (
			SELECT q.task_id, true AS fresh, false AS report, mesh.clock() AS at, a.session_id, a.generation
			FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'queued' AND t.cancel_requested_at IS NULL
					AND t.not_before <= mesh.clock() AND t.expires_at > mesh.clock()
				  AND `+dispatchable("t")+` AND (NOT a.diagnosis_only OR `+task.StartsNothingSQL("t")+`)
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), again AS (
			SELECT q.task_id, false AS fresh, q.unreported AS report, mesh.clock() AS at, a.session_id, a.generation
			FROM asked a CROSS JOIN LATERAL (
				SELECT t.task_id, t.offered_at = t.state_at AS unreported FROM lifecycle.task t
				WHERE t.node_id = a.node_id AND t.open AND t.state = 'dispatched' AND t.cancel_requested_at IS NULL
					AND t.session_epoch = a.generation
				  AND t.offered_at < mesh.clock() - interval '`+task.OfferAgainAfter+`' AND t.expires_at > mesh.clock()
					AND `+dispatchable("t")+` AND (NOT a.diagnosis_only OR `+task.StartsNothingSQL("t")+`)
				ORDER BY t.task_id LIMIT a.most FOR UPDATE SKIP LOCKED
			) q
		), chosen AS (
			SELECT * FROM fresh UNION ALL SELECT * FROM again
		), leased AS (
			UPDATE lifecycle.task t SET
				state = 'dispatched', attempt = t.attempt + CASE WHEN c.fresh THEN 1 ELSE 0 END,
				session_epoch = c.generation, session_id = c.session_id, offered_at = c.at,
				state_at = CASE WHEN c.fresh THEN c.at ELSE t.state_at END,
				key_id = CASE WHEN c.fresh THEN $5::text ELSE coalesce(t.key_id, $5::text) END,
				version = t.version + CASE WHEN c.report THEN 1 ELSE 0 END
			FROM chosen c WHERE t.task_id = c.task_id AND t.state IN ('queued', 'dispatched')
			RETURNING t.*, c.report
		)
		SELECT t.payload, t.report, t.key_id, `+task.Columns+` FROM leased t ORDER BY t.task_id`)
	// Goes from one node with open tasks to the next, so that it reads a few rows of each node, however many tasks that
	// has.
	nodesWithTasks = pg.Define(pg.RoleLifecycle, "dispatch.nodes_with_tasks", `
		WITH RECURSIVE now AS MATERIALIZED (SELECT mesh.clock() AS at), node (node_id, n) AS (
			SELECT (SELECT t.node_id FROM lifecycle.task t WHERE t.open AND t.node_id > $2::uuid ORDER BY t.node_id LIMIT 1), 1
			UNION ALL
			SELECT (SELECT t.node_id FROM lifecycle.task t WHERE t.open AND t.node_id > v.node_id ORDER BY t.node_id
				LIMIT 1), v.n + 1
			FROM node v WHERE v.node_id IS NOT NULL AND v.n < $1
		)
		SELECT v.node_id::text AS node_id, CASE
			WHEN g.diagnosis_only IS NULL THEN 0
			WHEN EXISTS (SELECT FROM lifecycle.task t, now
				WHERE t.node_id = v.node_id AND t.open AND t.expires_at > now.at AND `+dispatchable("t")+`
					AND (NOT g.diagnosis_only OR `+task.StartsNothingSQL("t")+`)
					AND (t.state = 'queued' AND t.not_before <= now.at
						OR t.state = 'dispatched' AND t.offered_at < now.at - interval '`+task.OfferAgainAfter+`')) THEN 2
			WHEN EXISTS (SELECT FROM lifecycle.task t, now
				WHERE t.node_id = v.node_id AND t.open AND t.expires_at > now.at AND `+dispatchable("t")+`
					AND t.state IN ('queued', 'dispatched')) THEN 1
			ELSE 0 END AS work
		FROM node v, LATERAL (SELECT (SELECT `+gate.DiagnosisOnlySQL+` FROM lifecycle.node_gate g
			WHERE g.node_id = v.node_id AND g.admitted AND g.session_open AND `+gate.HoldsSigningKeySQL+`) AS diagnosis_only
			OFFSET 0) g
		WHERE v.node_id IS NOT NULL ORDER BY v.node_id`)
	listCancels = pg.Define(pg.RoleLifecycle, "dispatch.list_cancels", `
		SELECT `+pg.Columns[cancelRow]("t")+` FROM lifecycle.task t
		WHERE t.cancel_requested_at IS NOT NULL AND t.open AND t.state <> 'queued' AND NOT (SELECT mesh.rolled_back())
			AND EXISTS (SELECT FROM lifecycle.node_gate g WHERE g.node_id = t.node_id AND g.session_open)
		ORDER BY t.task_id LIMIT $1`)
)
