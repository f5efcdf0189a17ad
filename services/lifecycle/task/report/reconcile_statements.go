package report

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// inFlight selects the ids of the tasks in flight at nodes, and of those in $2: each part by an index of its own,
// however many tasks have ended.
func inFlight(nodes string) string {
	return `SELECT o.task_id FROM lifecycle.task o WHERE o.node_id = ` + nodes + ` AND o.open
		AND o.state <> 'queued' UNION SELECT unnest($2::uuid[])`
}

var (
	lockInFlight = pg.Define(pg.RoleLifecycle, "report.lock_in_flight", `
		SELECT t.node_id::text FROM lifecycle.task t
		WHERE t.task_id IN (`+inFlight("ANY ($1::uuid[])")+`) AND t.node_id = ANY ($1::uuid[])
			AND (t.open AND t.state <> 'queued' OR t.task_id = ANY ($2::uuid[])) ORDER BY t.task_id FOR UPDATE`)
	lockRunsInFlight = pg.Define(pg.RoleLifecycle, "report.lock_runs_in_flight", `
		SELECT FROM lifecycle.saga_run r WHERE r.id IN (
			SELECT t.run_id FROM lifecycle.task t WHERE t.node_id = ANY ($1::uuid[]) AND t.open AND t.state <> 'queued'
				AND (t.cancel_requested_at IS NOT NULL OR t.node_id = ANY ($2::uuid[]))
			UNION
			SELECT w.id FROM lifecycle.saga_run w WHERE w.workspace_id = ANY ($3::uuid[])
				AND w.state IN ('pending', 'running', 'waiting', 'compensating'))
		AND r.state IN ('pending', 'running', 'waiting', 'compensating') ORDER BY r.id FOR NO KEY UPDATE`)
	tasksInFlight = pg.Define(pg.RoleLifecycle, "report.in_flight", `
		SELECT `+task.Columns+` FROM lifecycle.task t
		WHERE t.task_id IN (`+inFlight("$1")+`) AND t.node_id = $1
			AND (t.open AND t.state <> 'queued' OR t.task_id = ANY ($2::uuid[]))
		ORDER BY t.task_id FOR UPDATE`)
	postpone = pg.Define(pg.RoleLifecycle, "report.postpone", `
		UPDATE lifecycle.task t SET
			offered_at = CASE WHEN t.state = 'queued' THEN t.offered_at ELSE mesh.clock() END,
			not_before = CASE WHEN t.state <> 'queued' THEN t.not_before ELSE
				greatest(t.not_before,
					least(mesh.clock() + interval '`+task.OfferAgainAfter+`', t.expires_at - interval '1 second')) END
		WHERE t.task_id = $1`)
	transitionTask = pg.Define(pg.RoleLifecycle, "report.move", `
		UPDATE lifecycle.task t SET state = $2::text, session_epoch = $3, session_id = nullif($4, '')::uuid,
			state_at = CASE WHEN t.state = $2::text THEN t.state_at ELSE mesh.clock() END,
			offered_at = CASE WHEN $2::text = 'dispatched' THEN mesh.clock() - interval '1 hour' ELSE t.offered_at END,
			payload = `+task.PayloadAt("$2::text")+`, version = t.version + 1
		WHERE t.task_id = $1 RETURNING `+task.Columns)
)
