package saga

import (
	"encoding/json"
	"strconv"

	"github.com/gpuaas/mesh/internal/pg"
)

// stepOutput is the output that a step which has succeeded left for later ones.
type stepOutput struct {
	RunID  string          `db:"run_id"`
	Name   string          `db:"name"`
	Output json.RawMessage `db:"output"`
}

// Statements of leases, of the runs that a driver has leased, and of reading.
var (
	leaseRuns = pg.Define(pg.RoleLifecycle, "saga.lease_runs", `
		WITH c AS (
			SELECT r.id, r.fence, r.open_attempt, r.open_since FROM lifecycle.saga_run r
			WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.next_at <= mesh.clock()
				AND r.definition || ':' || r.def_version = ANY ($4) AND r.id <> ALL ($5::uuid[])
				AND NOT EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.run_id = r.id AND p.since IS NOT NULL)
			ORDER BY r.next_at LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)
		UPDATE lifecycle.saga_run r SET owner = $1, fence = mesh.next(r.fence),
			lease_until = mesh.clock() + make_interval(secs => $2),
			next_at = mesh.clock() + make_interval(secs => $2), heartbeat_at = mesh.clock(),
				losses = r.losses + (r.owner IS NOT NULL)::int,
			state = CASE WHEN r.phase = 'undo' THEN 'compensating' ELSE 'running' END,
			why_waiting = CASE WHEN r.phase = 'undo' THEN 'undoing the step "'
				ELSE 'doing the step "' END || COALESCE(r.step_names[r.step + 1], '?') || '"',
			op_seq = CASE WHEN r.fence = 0 THEN mesh.next(r.op_seq) ELSE r.op_seq END,
			open_attempt = (r.fence = 0)::int, open_since = CASE WHEN r.fence = 0 THEN mesh.clock() END,
			version = r.version + 1
		FROM c WHERE r.id = c.id
		RETURNING `+runColumns+`, COALESCE(extract(epoch FROM r.deadline_at - mesh.clock()), 86400)::float8,
			(SELECT mesh.rolled_back()), c.fence, c.open_attempt, c.open_since,
			COALESCE((SELECT w.op_seq FROM lifecycle.workspace w WHERE w.id = r.workspace_id) > r.op_last, false)`)
	// knowsLater selects whether the workspace has an operation number or an epoch above those of a run.
	knowsLater = pg.Define(pg.RoleLifecycle, "saga.knows_later", `
		SELECT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.id = $1 AND (w.op_seq > $2 OR w.epoch > $3))`)
	anyLive = pg.Define(pg.RoleLifecycle, "saga.any_live", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.saga_run r WHERE r.state IN ('pending', 'running', 'waiting', 'compensating'))`)
	resumeAttempts = pg.Define(pg.RoleLifecycle, "saga.resume_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'running', fence = r.fence, why_waiting = '', heartbeat_at = mesh.clock(),
			version = s.version + 1
		FROM lifecycle.saga_run r WHERE r.id = s.run_id AND s.run_id = ANY ($1::uuid[]) AND s.state = 'waiting'
			RETURNING `+stepColumns)
	stepOutputs = pg.Define(pg.RoleLifecycle, "saga.step_outputs", `
		SELECT `+pg.Columns[stepOutput]("s")+` FROM lifecycle.saga_step s
		WHERE s.run_id = ANY ($1::uuid[]) AND s.dir = 'do' AND s.state = 'succeeded' AND s.output IS NOT NULL`)
	releaseOwned = pg.Define(pg.RoleLifecycle, "saga.release_owned", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(), lease_until = mesh.clock()
		WHERE r.owner = $1 AND r.state IN ('running', 'compensating')`)
	runDefinition = pg.Define(pg.RoleLifecycle, "saga.run_definition", `
		SELECT r.workspace_id, r.definition FROM lifecycle.saga_run r WHERE r.id = $1`)
	quarantineRun = pg.Define(pg.RoleLifecycle, "saga.quarantine_run", `
		UPDATE lifecycle.saga_run r SET state = 'stuck', owner = NULL, lease_until = NULL,
			stuck_reason = 'unreadable: ' || $2::text, why_waiting = 'waiting for an operator: ' || $2::text,
				open_attempt = 0, open_since = NULL, version = r.version + 1
		WHERE r.id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating') RETURNING `+runColumns)
	loseOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.lose_open_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'lost', finished_at = mesh.clock(), outcome = 'lost', version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+stepColumns)
	quarantineWorkspace = pg.Define(pg.RoleLifecycle, "saga.quarantine_workspace", `
		UPDATE lifecycle.workspace w SET state = 'stuck', state_at = mesh.clock(),
			last_error_code = 'unreadable', last_error = $2,
			version = w.version + 1
		WHERE w.id = (SELECT r.workspace_id FROM lifecycle.saga_run r WHERE r.id = $1) AND w.run_id = $1`)
	beatRuns = pg.Define(pg.RoleLifecycle, "saga.beat_runs", `
		WITH h AS (
			SELECT r.id FROM lifecycle.saga_run r JOIN unnest($1::uuid[], $2::bigint[]) AS x (id, fence) ON r.id = x.id
				AND r.fence = x.fence
			WHERE r.owner = $3 FOR NO KEY UPDATE OF r SKIP LOCKED)
		UPDATE lifecycle.saga_run r SET lease_until = mesh.clock() + make_interval(secs => $4),
			next_at = mesh.clock() + make_interval(secs => $4),
			heartbeat_at = mesh.clock(), version = r.version + 1
		FROM h WHERE r.id = h.id RETURNING `+runColumns)
	beatSteps = pg.Define(pg.RoleLifecycle, "saga.beat_steps", `
		UPDATE lifecycle.saga_step s SET heartbeat_at = mesh.clock(), version = s.version + 1
		WHERE s.run_id = ANY ($1::uuid[]) AND s.state = 'running' RETURNING `+stepColumns)
	beatRun = pg.Define(pg.RoleLifecycle, "saga.beat_run", `
		UPDATE lifecycle.saga_run r SET lease_until = mesh.clock() + make_interval(secs => $4),
			next_at = mesh.clock() + make_interval(secs => $4), heartbeat_at = mesh.clock()
		WHERE r.id = $1 AND r.fence = $2 AND r.owner = $3 RETURNING r.cancel_requested_at IS NOT NULL`)
	ownsRun = pg.Define(pg.RoleLifecycle, "saga.owns_run", `
		SELECT COALESCE(r.owner = $2, false) FROM lifecycle.saga_run r WHERE r.id = $1`)
	cancelledRuns = pg.Define(pg.RoleLifecycle, "saga.cancelled_runs", `
		SELECT r.id FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND r.cancel_requested_at IS NOT NULL`)
	workspaceByID = pg.Define(pg.RoleLifecycle, "saga.workspace_by_id", `
		SELECT `+workspaceColumns+` FROM lifecycle.workspace w WHERE w.id = $1`)
	runByID = pg.Define(pg.RoleLifecycle, "saga.run_by_id", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = $1`)
	liveRun = pg.Define(pg.RoleLifecycle, "saga.live_run", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck')`)
	timeline = pg.Define(pg.RoleLifecycle, "saga.timeline", `
		SELECT `+stepColumns+` FROM lifecycle.saga_step s WHERE s.run_id = $1 ORDER BY s.op_seq, s.started_at`)
	openOfRun = pg.Define(pg.RoleLifecycle, "saga.open_of_run", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = $1 AND r.open_attempt > 0 AND NOT EXISTS (
			SELECT FROM lifecycle.saga_step s WHERE s.run_id = r.id AND s.step = r.step AND s.dir = r.phase
				AND s.attempt = r.open_attempt)`)
	letGoRun = pg.Define(pg.RoleLifecycle, "saga.let_go", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(), lease_until = mesh.clock()
		WHERE r.id = $1 AND r.fence = $2 AND r.owner = $3`)
	runsByID = pg.Define(pg.RoleLifecycle, "saga.runs_by_id", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[])`)
	workspacesByID = pg.Define(pg.RoleLifecycle, "saga.workspaces_by_id", `
		SELECT `+workspaceColumns+` FROM lifecycle.workspace w WHERE w.id = ANY ($1::uuid[])`)
	lockRuns = pg.Define(pg.RoleLifecycle, "saga.lock_runs", `
		SELECT FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) ORDER BY r.id FOR NO KEY UPDATE`)
	lockForRows = pg.Define(pg.RoleLifecycle, "saga.lock_for_rows", `
		SELECT r.fence FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id WHERE r.id = $1
		FOR NO KEY UPDATE OF r, w`)
	touchWorkspacesOf = pg.Define(pg.RoleLifecycle, "saga.touch_workspaces", `
		UPDATE lifecycle.workspace w SET state = COALESCE(NULLIF(x.state, ''), w.state),
			state_at = CASE WHEN x.state IN ('', w.state) THEN w.state_at ELSE mesh.clock() END,
			last_error_code = x.code, last_error = x.err, version = w.version + 1
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[]) AS x (id, run_id, state, code, err)
		WHERE w.id = x.id AND w.run_id = x.run_id RETURNING `+workspaceColumns)
)

// Statements that start and wake runs.
var (
	insertWorkspace = pg.Define(pg.RoleLifecycle, "saga.insert_workspace", `
		INSERT INTO lifecycle.workspace (id, tenant_id, name, spec, spec_digest, state, created_by)
		VALUES ($1, $2, $3, $4, $5, 'provisioning', $6)`)
	// startRun inserts a run and gives it its workspace, according to the workspace's row once it is locked. It returns no
	// row if another run is live, or if the workspace does not allow the run: then the inserted run must be rolled back.
	startRun = pg.Define(pg.RoleLifecycle, "saga.start_run", `
		WITH r AS (
			INSERT INTO lifecycle.saga_run AS r (id, workspace_id, tenant_id, kind, definition, def_version, round, parent_run_id,
				correlation_id, requester, step_names, input, epoch, state, deadline_at, why_waiting, op_seq, op_last,
				owner, fence, lease_until, next_at, heartbeat_at, open_attempt, open_since)
			SELECT $1, w.id, w.tenant_id, $3, $4, $5, $6, NULLIF($7, '')::uuid, $8, $9, $10, $11,
				CASE WHEN $12 THEN mesh.next(w.epoch) ELSE w.epoch END, CASE WHEN $20 = '' THEN 'pending' ELSE 'running' END,
				mesh.clock() + make_interval(secs => $13), $21,
				mesh.next(w.op_seq) - ($20 = '')::int, mesh.next(w.op_seq) + `+strconv.Itoa(opRange-1)+`,
				NULLIF($20, ''), CASE WHEN $20 = '' THEN 0 ELSE mesh.next(0) END,
				CASE WHEN $20 <> '' THEN mesh.clock() + make_interval(secs => $22) END, mesh.clock() + make_interval(secs => $22),
				CASE WHEN $20 <> '' THEN mesh.clock() END, ($20 <> '')::int, CASE WHEN $20 <> '' THEN mesh.clock() END
			FROM lifecycle.workspace w WHERE w.id = $2
			ON CONFLICT (workspace_id) WHERE state IN ('pending', 'running', 'waiting', 'compensating', 'stuck') DO NOTHING
			RETURNING r.id, r.workspace_id, r.epoch, r.op_seq, r.op_last, r.created_at, r.next_at, r.deadline_at, r.fence, r.lease_until,
				r.heartbeat_at, r.open_since, r.tried_since),
		w AS (
			UPDATE lifecycle.workspace w SET run_id = r.id, epoch = r.epoch, state = $14, state_at = mesh.clock(),
				last_error_code = '', last_error = '', reset_done = false, version = w.version + 1,
				op_seq = mesh.next(w.op_seq) + `+strconv.Itoa(opRange-1)+`, desired_state = COALESCE(NULLIF($15, ''), w.desired_state),
				retry_used = `+healthyReset+` + $16,
				retry_window_start = CASE WHEN $16 = 1 AND `+healthyReset+` = 0 THEN mesh.clock() ELSE w.retry_window_start END
			FROM r WHERE w.id = r.workspace_id AND (cardinality($17::text[]) = 0 OR w.state = ANY ($17))
				AND r.epoch = CASE WHEN $12 THEN mesh.next(w.epoch) ELSE w.epoch END
				AND ($16 = 0 OR (w.reset_done AND w.retry_used = $18)) AND ($19 = 0::bigint OR w.epoch = $19)
			RETURNING w.*)
		SELECT `+workspaceColumns+`, r.op_seq AS run_op_seq, r.op_last AS run_op_last, r.created_at AS run_created_at,
			r.next_at AS run_next_at, r.deadline_at AS run_deadline_at, r.fence AS run_fence, r.lease_until AS run_lease_until,
			r.heartbeat_at AS run_heartbeat_at, r.open_since AS run_open_since, r.tried_since AS run_tried_since,
			(SELECT mesh.rolled_back()) AS paused
		FROM w JOIN r ON r.workspace_id = w.id`)
	// giveRange gives a run that was just inserted another range of numbers, if numbers of its workspace were drawn
	// meanwhile.
	giveRange = pg.Define(pg.RoleLifecycle, "saga.give_range", `
		UPDATE lifecycle.saga_run r SET op_seq = $2, op_last = $3 WHERE r.id = $1`)
	wakeRuns             = pg.Define(pg.RoleLifecycle, "saga.wake_runs", wakeSQL("id"))
	wakeRunsOfWorkspaces = pg.Define(pg.RoleLifecycle, "saga.wake_runs_of_workspaces", wakeSQL("workspace_id"))
)

// wakeSQL wakes the runs whose column is one of $1.
func wakeSQL(column string) string {
	return `
		WITH due AS (SELECT r.id FROM lifecycle.saga_run r WHERE r.` + column + ` = ANY ($1::uuid[])
			AND r.state IN ('pending', 'running', 'waiting', 'compensating') ORDER BY r.id FOR NO KEY UPDATE)
		UPDATE lifecycle.saga_run r SET signal = r.signal + 1,
			next_at = CASE WHEN r.owner IS NULL AND r.wakeable THEN LEAST(r.next_at, mesh.clock()) ELSE r.next_at END
		FROM due WHERE r.id = due.id`
}

// Statements of rollback mode and of stalls.
var (
	pauseRun = pg.Define(pg.RoleLifecycle, "saga.pause", `
		INSERT INTO lifecycle.run_pause AS p (run_id, since) VALUES ($1, mesh.clock())
		ON CONFLICT (run_id) DO UPDATE SET since = COALESCE(p.since, mesh.clock())`)
	anyPaused = pg.Define(pg.RoleLifecycle, "saga.any_paused", `
		SELECT NOT mesh.rolled_back() AND EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.since IS NOT NULL)`)
	endPauses = pg.Define(pg.RoleLifecycle, "saga.end_pauses", `
		WITH due AS (SELECT r.id, mesh.clock() - p.since AS stood FROM lifecycle.saga_run r
			JOIN lifecycle.run_pause p ON p.run_id = r.id
			WHERE r.id = ANY ($1::uuid[]) AND p.since IS NOT NULL AND NOT mesh.rolled_back()
				ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED)
		UPDATE lifecycle.run_pause p SET since = NULL, total = p.total + due.stood FROM due
		WHERE p.run_id = due.id AND p.since IS NOT NULL RETURNING p.run_id, extract(epoch FROM due.stood)::float8`)
	pausedRuns = pg.Define(pg.RoleLifecycle, "saga.paused_runs", `
		SELECT p.run_id FROM lifecycle.run_pause p JOIN lifecycle.saga_run r ON r.id = p.run_id
		WHERE p.since IS NOT NULL AND NOT mesh.rolled_back() ORDER BY p.run_id LIMIT $1`)
	moveOnRuns = pg.Define(pg.RoleLifecycle, "saga.move_on_runs", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(),
			deadline_at = r.deadline_at + make_interval(secs => x.stood),
			tried_since = r.tried_since + make_interval(secs => x.stood), progress_at = mesh.clock(),
			why_waiting = 'waiting for a worker: rollback mode is over', version = r.version + 1
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE r.id = x.run_id AND r.state IN ('pending', 'waiting', 'compensating') RETURNING `+runColumns)
	moveOnAttempts = pg.Define(pg.RoleLifecycle, "saga.move_on_attempts", `
		UPDATE lifecycle.saga_step s SET deadline_at = s.deadline_at + make_interval(secs => x.stood),
			progress_at = mesh.clock(),
			why_waiting = 'waiting for a worker: rollback mode is over', version = s.version + 1
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE s.run_id = x.run_id AND s.state = 'waiting' RETURNING `+stepColumns)
	findStalls = pg.Define(pg.RoleLifecycle, "saga.find_stalls", `
		(SELECT s.run_id, s.step, s.dir, s.attempt,
			'step_stalled: no progress at "' || s.name || '" for ' || p.after AS reason,
			extract(epoch FROM p.after)::float8 AS after
		FROM lifecycle.saga_run r CROSS JOIN LATERAL (`+openOrStored+`) s
		CROSS JOIN LATERAL (SELECT COALESCE((SELECT make_interval(secs => x.after)
			FROM unnest($5::text[], $6::text[], $7::float8[]) AS x (key, name, after)
			WHERE x.key = r.definition || ':' || r.def_version AND x.name = s.name), s.stall_after) AS after) p
		WHERE r.state IN ('running', 'waiting', 'compensating') AND NOT s.stalled
			AND `+quietSince+` + p.after < mesh.clock()
			AND `+notPaused+` LIMIT $1)
		UNION ALL
		(SELECT r.id, r.step, r.phase, 0, 'driver_silent: due since ' || to_char(r.next_at AT TIME ZONE 'UTC',
			'YYYY-MM-DD"T"HH24:MI:SS"Z"') ||
			' and taken up by no worker', 0
		FROM lifecycle.saga_run r
		WHERE r.state IN ('pending', 'running', 'waiting', 'compensating')
			AND r.next_at < mesh.clock() - make_interval(secs => $2)
			AND r.stuck_reason = '' AND `+notPaused+` LIMIT $1)
		UNION ALL
		(SELECT r.id, r.step, r.phase, 0, 'run_stalled: not over after ' || make_interval(secs => d.after), 0
		FROM lifecycle.saga_run r JOIN unnest($3::text[], $4::float8[]) AS d (name, after) ON d.name = r.definition
		WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.stuck_reason = '' AND `+notPaused+`
			AND r.created_at + make_interval(secs => d.after) + COALESCE((SELECT p.total FROM lifecycle.run_pause p
				WHERE p.run_id = r.id), '0') < mesh.clock() LIMIT $1)`)
	flagRun = pg.Define(pg.RoleLifecycle, "saga.flag_run", `
		UPDATE lifecycle.saga_run r SET stuck_reason = $4, version = r.version + 1
		WHERE r.id = $1 AND r.step = $2 AND r.phase = $3 AND r.state IN ('pending', 'running', 'waiting', 'compensating')
			AND ($5 > 0 OR r.stuck_reason = '') RETURNING `+runColumns)
	flagAttempt = pg.Define(pg.RoleLifecycle, "saga.flag_attempt", `
		UPDATE lifecycle.saga_step s SET stalled = true, version = s.version + 1
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state IN ('running', 'waiting')
			AND NOT s.stalled
			AND `+quietSince+` + make_interval(secs => $5) < mesh.clock() RETURNING `+stepColumns)
)
