package saga

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of the verbs that people use on runs.
var (
	cancelRun = pg.Define(pg.RoleLifecycle, "saga.cancel_run", `
		UPDATE lifecycle.saga_run r SET cancel_requested_at = mesh.clock(), cancel_by = $2, cancel_reason = $3,
			signal = r.signal + 1, next_at = CASE WHEN r.owner IS NULL THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END,
				version = r.version + 1
		WHERE r.id = $1 RETURNING `+runs.Columns)
	amendRun = pg.Define(pg.RoleLifecycle, "saga.amend_run", `
		UPDATE lifecycle.saga_run r SET input = $3, signal = r.signal + 1, version = r.version + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		WHERE r.id = $1 AND r.phase = 'do' AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
			AND r.state IN ('pending', 'running', 'waiting') RETURNING `+runs.Columns)
	endStuckRun = pg.Define(pg.RoleLifecycle, "saga.end_stuck", `
		UPDATE lifecycle.saga_run r SET state = $2, finished_at = mesh.clock(), stuck_reason = '',
			why_waiting = '',
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runs.Columns)
	unstickRun = pg.Define(pg.RoleLifecycle, "saga.unstick", `
		UPDATE lifecycle.saga_run r SET state = $2, step = $3, attempts = 0, losses = 0,
			tried_since = mesh.clock(), stuck_reason = '',
			why_waiting = 'waiting for a worker: ' || $4, next_at = mesh.clock(), wakeable = true, version = r.version + 1,
			deadline_at = CASE WHEN r.deadline_at <= mesh.clock() THEN mesh.clock() + make_interval(secs => $5)
				ELSE r.deadline_at END
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runs.Columns)
	lockRunByID = pg.Define(pg.RoleLifecycle, "saga.lock_run", `
		SELECT `+runs.Columns+` FROM lifecycle.saga_run r WHERE r.id = $1 FOR NO KEY UPDATE`)
	cancelParked = pg.Define(pg.RoleLifecycle, "saga.cancel_parked", `
		UPDATE lifecycle.saga_run r SET state = 'failed', fence = mesh.next(r.fence),
			cancel_requested_at = mesh.clock(), cancel_by = $3, cancel_reason = $4, error_code = $5, error = $6,
			error_layer = $7, error_step = r.step, stuck_reason = '', why_waiting = '', finished_at = mesh.clock(),
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'waiting' AND r.owner IS NULL AND r.phase = 'do'
			AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
		RETURNING `+runs.Columns)
	cancelOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.cancel_open_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'cancelled', outcome = 'cancelled',
			finished_at = mesh.clock(), why_waiting = '', error_code = $2, error = $3, error_layer = $4, version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+runs.AttemptColumns)
)
