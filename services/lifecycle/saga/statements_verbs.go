package saga

import "github.com/gpuaas/mesh/internal/pg"

// Statements of a step's environment.
var (
	holdRun = pg.Define(pg.RoleLifecycle, "saga.hold_run", `
		SELECT r.fence = $2 AND r.owner IS NOT NULL AND r.step = $3 AND r.phase = $4, mesh.rolled_back()
		FROM lifecycle.saga_run r WHERE r.id = $1 FOR SHARE`)
	readProgress = pg.Define(pg.RoleLifecycle, "saga.read_progress", `
		SELECT COALESCE(o.progress->>'note' = $6, false), COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' AND `+sameTry("p")+`
			ORDER BY p.attempt DESC LIMIT 1), true), COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' ORDER BY p.attempt DESC
				LIMIT 1), true)
		FROM lifecycle.saga_run r
		CROSS JOIN LATERAL (SELECT r.id AS run_id, $3::int AS step, $4::text AS dir, $5::int AS attempt) s
		LEFT JOIN lifecycle.saga_step o ON o.run_id = s.run_id AND o.step = s.step AND o.dir = s.dir AND o.attempt = s.attempt
		WHERE r.id = $1 AND r.fence = $2 AND (o.state = 'running'
			OR o.run_id IS NULL AND r.step = s.step AND r.phase = s.dir AND r.open_attempt = s.attempt)`)
	progressRun = pg.Define(pg.RoleLifecycle, "saga.progress_run", `
		UPDATE lifecycle.saga_run r SET version = r.version + 1,
			progress_at = CASE WHEN $3 THEN mesh.clock() ELSE r.progress_at END,
			stuck_reason = CASE WHEN $4 AND r.stuck_reason NOT LIKE 'run_stalled%' THEN '' ELSE r.stuck_reason END
		WHERE r.id = $1 AND r.fence = $2 RETURNING `+runColumns)
	progressStep = pg.Define(pg.RoleLifecycle, "saga.progress_step", `
		UPDATE lifecycle.saga_step s SET progress_at = CASE WHEN $6 THEN mesh.clock() ELSE s.progress_at END,
			stalled = s.stalled AND NOT $6, version = s.version + 1, progress = jsonb_build_object('note', $5::text)
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state = 'running'
		RETURNING `+stepColumns)
)

// Statements of the verbs that people use on runs.
var (
	cancelRun = pg.Define(pg.RoleLifecycle, "saga.cancel_run", `
		UPDATE lifecycle.saga_run r SET cancel_requested_at = mesh.clock(), cancel_by = $2, cancel_reason = $3,
			signal = r.signal + 1, next_at = CASE WHEN r.owner IS NULL THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END,
				version = r.version + 1
		WHERE r.id = $1 RETURNING `+runColumns)
	amendRun = pg.Define(pg.RoleLifecycle, "saga.amend_run", `
		UPDATE lifecycle.saga_run r SET input = $3, signal = r.signal + 1, version = r.version + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		WHERE r.id = $1 AND r.phase = 'do' AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
			AND r.state IN ('pending', 'running', 'waiting') RETURNING `+runColumns)
	archiveRuns = pg.Define(pg.RoleLifecycle, "saga.archive_runs", `
		UPDATE lifecycle.saga_run r SET archived_at = mesh.clock() WHERE r.workspace_id = $1
			AND r.archived_at IS NULL`)
	resetWorkspace = pg.Define(pg.RoleLifecycle, "saga.reset_workspace", `
		UPDATE lifecycle.workspace w SET reset_done = true, version = w.version + 1
		WHERE w.id = $1 AND w.state = 'failed' AND NOT w.reset_done`)
	listOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.list_open_attempts", `
		SELECT format('attempt %s at %s the step "%s" of operation %s is open: it is %s', s.attempt,
			CASE s.dir WHEN 'do' THEN 'doing' ELSE 'undoing' END, s.name, s.run_id, s.state)
		FROM lifecycle.saga_step s JOIN lifecycle.saga_run r ON r.id = s.run_id
		WHERE r.workspace_id = $1 AND s.state IN ('running', 'waiting') ORDER BY s.op_seq LIMIT 10`)
	formerRunsOf = pg.Define(pg.RoleLifecycle, "saga.former_runs", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.workspace_id = $1 ORDER BY r.created_at DESC, r.id DESC
			LIMIT 2`)
	endStuckRun = pg.Define(pg.RoleLifecycle, "saga.end_stuck", `
		UPDATE lifecycle.saga_run r SET state = $2, finished_at = mesh.clock(), stuck_reason = '',
			why_waiting = '',
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runColumns)
	unstickRun = pg.Define(pg.RoleLifecycle, "saga.unstick", `
		UPDATE lifecycle.saga_run r SET state = $2, step = $3, attempts = 0, losses = 0,
			tried_since = mesh.clock(), stuck_reason = '',
			why_waiting = 'waiting for a worker: ' || $4, next_at = mesh.clock(), wakeable = true, version = r.version + 1,
			deadline_at = CASE WHEN r.deadline_at <= mesh.clock() THEN mesh.clock() + make_interval(secs => $5)
				ELSE r.deadline_at END
		WHERE r.id = $1 AND r.state = 'stuck' RETURNING `+runColumns)
	lockRunByID = pg.Define(pg.RoleLifecycle, "saga.lock_run", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = $1 FOR NO KEY UPDATE`)
	lockLiveRun = pg.Define(pg.RoleLifecycle, "saga.lock_live_run", `
		SELECT FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating',
			'stuck') FOR NO KEY UPDATE`)
	cancelParked = pg.Define(pg.RoleLifecycle, "saga.cancel_parked", `
		UPDATE lifecycle.saga_run r SET state = 'failed', fence = mesh.next(r.fence),
			cancel_requested_at = mesh.clock(), cancel_by = $3, cancel_reason = $4, error_code = $5, error = $6,
			error_layer = $7, error_step = r.step, stuck_reason = '', why_waiting = '', finished_at = mesh.clock(),
			version = r.version + 1
		WHERE r.id = $1 AND r.state = 'waiting' AND r.owner IS NULL AND r.phase = 'do'
			AND r.step_names[r.step + 1] = $2 AND r.cancel_requested_at IS NULL
		RETURNING `+runColumns)
	cancelOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.cancel_open_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'cancelled', outcome = 'cancelled',
			finished_at = mesh.clock(), why_waiting = '', error_code = $2, error = $3, error_layer = $4, version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+stepColumns)
)
