package dispatch

import (
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

// staleRow is a task that the sweep ended.
type staleRow struct {
	task.Record
	// LeasedAt is when the task was leased, if no event has reported that.
	LeasedAt *time.Time `db:"leased_at"`
}

// setting is the SET list of a change of a task beside its state. Its detail is $4.
type setting string

const (
	setCancelled setting = `cancel_requested_at = coalesce(t.cancel_requested_at, mesh.clock()), cancel_reason = $4`
	// The window is the one of the first time: expires_at - created_at grows with each time, and with the pauses of a run.
	setQueued setting = `expires_at = mesh.clock() + coalesce(t.start_within, t.expires_at - t.created_at),
		start_within = coalesce(t.start_within, t.expires_at - t.created_at), cancel_requested_at = NULL,
		reason = '', error = $4`
	setError   setting = `error = $4`
	setRefused setting = `error = $4, reason = $5`
)

var (
	changeTask = pg.DefineDynamic(pg.RoleLifecycle, "dispatch.change", func(s setting) string {
		return `
			UPDATE lifecycle.task t SET state = $2::text,
				state_at = CASE WHEN t.state = $2::text THEN t.state_at ELSE mesh.clock() END, version = t.version + 1,
				payload = ` + task.PayloadAt("$2::text") + `, ` + task.MarkReported + `, ` + string(s) + `
			WHERE t.task_id = $1 AND t.state = $3 RETURNING ` + task.Columns
	}, setCancelled, setQueued, setError, setRefused)
	lockTask = pg.Define(pg.RoleLifecycle, "dispatch.lock", `
		SELECT `+task.Columns+` FROM lifecycle.task t WHERE t.task_id = $1 FOR UPDATE`)
	lockOpenOfRun = pg.Define(pg.RoleLifecycle, "dispatch.lock_open_of_run", `
		SELECT `+task.Columns+` FROM lifecycle.task t
		WHERE t.run_id = $1 AND t.idem_key LIKE $1::text || '/%/do/%'
			AND ($2::text = '' OR NOT starts_with(t.idem_key, $2::text || '/'))
			AND t.state IN ('queued', 'dispatched', 'delivered', 'running')
		  AND t.cancel_requested_at IS NULL
		ORDER BY t.task_id FOR UPDATE`)
	endStale = pg.Define(pg.RoleLifecycle, "dispatch.end_stale", `
		WITH stale AS (
			SELECT t.task_id, CASE WHEN t.state = 'dispatched' AND t.offered_at = t.state_at THEN t.state_at END AS leased_at
			FROM lifecycle.task t LEFT JOIN lifecycle.node_gate g ON g.node_id = t.node_id
			WHERE t.expires_at <= mesh.clock() AND t.open AND `+dispatchable("t")+`
			  -- What a run queued that stands still gets its time back when the run goes on.
			  AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.run_id = t.run_id AND p.since IS NOT NULL)
			  AND (t.state = 'queued' OR g.node_id IS NULL OR NOT `+gate.ConnectedSQL+`
			       OR t.state = 'dispatched' AND t.expires_at <= mesh.clock() - interval '`+undeliveredFor+`')
			ORDER BY t.task_id LIMIT $1 FOR UPDATE OF t SKIP LOCKED
		)
		UPDATE lifecycle.task t SET state = CASE WHEN t.state = 'queued' THEN 'expired' ELSE 'outcome_unknown' END,
			payload = `+task.PayloadAt("CASE WHEN t.state = 'queued' THEN 'expired' ELSE 'outcome_unknown' END")+`,
			state_at = mesh.clock(), reason = 'task_outside_window', version = t.version + 1
		FROM stale WHERE t.task_id = stale.task_id RETURNING stale.leased_at, `+task.Columns)
	clearPayloads = pg.Define(pg.RoleLifecycle, "dispatch.clear_payloads", `
		WITH over AS (
			SELECT t.task_id FROM lifecycle.task t
			WHERE NOT t.open AND t.payload <> '' AND NOT (SELECT mesh.rolled_back())
			ORDER BY t.expires_at LIMIT $1 FOR UPDATE SKIP LOCKED
		)
		UPDATE lifecycle.task t SET payload = '' FROM over WHERE t.task_id = over.task_id`)
)
