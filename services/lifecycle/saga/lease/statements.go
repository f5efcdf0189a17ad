package lease

import (
	"strconv"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of leases and of the attempts that leases open and close. Those of an attempt that is open in a run's row
// run in a transaction that holds the row's lock.
var (
	leaseRuns = pg.Define(pg.RoleLifecycle, "saga.lease_runs", `
		WITH c AS (
			SELECT r.id, r.fence, r.open_attempt, r.open_since FROM lifecycle.saga_run r
			WHERE r.state IN ('pending', 'running', 'waiting', 'compensating') AND r.next_at <= mesh.clock()
				AND r.definition || ':' || r.def_version = ANY ($4) AND r.id <> ALL ($5::uuid[])
				AND r.kind = ANY ($6) AND r.phase = ANY ($7)
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
		RETURNING `+runs.Columns+`, COALESCE(extract(epoch FROM r.deadline_at - mesh.clock()), 86400)::float8 AS seconds_left,
			(SELECT mesh.rolled_back()) AS paused, c.fence AS former_fence, c.open_attempt AS former_attempt,
			c.open_since AS former_since,
			COALESCE((SELECT w.op_seq FROM lifecycle.workspace w WHERE w.id = r.workspace_id) > r.op_last, false)
				AS range_passed`)
	resumeAttempts = pg.Define(pg.RoleLifecycle, "saga.resume_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'running', fence = r.fence, why_waiting = '', heartbeat_at = mesh.clock(),
			version = s.version + 1
		FROM lifecycle.saga_run r WHERE r.id = s.run_id AND s.run_id = ANY ($1::uuid[]) AND s.state = 'waiting'
			RETURNING `+runs.AttemptColumns)
	stepOutputs = pg.Define(pg.RoleLifecycle, "saga.step_outputs", `
		SELECT `+pg.Columns[stepOutput]("s")+` FROM lifecycle.saga_step s
		WHERE s.run_id = ANY ($1::uuid[]) AND s.dir = 'do' AND s.state = 'succeeded' AND s.output IS NOT NULL`)
	releaseOwned = pg.Define(pg.RoleLifecycle, "saga.release_owned", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(), lease_until = mesh.clock()
		WHERE r.owner = $1 AND r.state IN ('running', 'compensating')`)
	runDefinition = pg.Define(pg.RoleLifecycle, "saga.run_definition", `
		SELECT r.workspace_id::text, r.definition FROM lifecycle.saga_run r WHERE r.id = $1`)
	quarantineRun = pg.Define(pg.RoleLifecycle, "saga.quarantine_run", `
		UPDATE lifecycle.saga_run r SET state = 'stuck', owner = NULL, lease_until = NULL,
			stuck_reason = 'unreadable: ' || $2::text, why_waiting = 'waiting for an operator: ' || $2::text,
				open_attempt = 0, open_since = NULL, version = r.version + 1
		WHERE r.id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating') RETURNING `+runs.Columns)
	loseOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.lose_open_attempts", `
		UPDATE lifecycle.saga_step s SET state = 'lost', finished_at = mesh.clock(), outcome = 'lost', version = s.version + 1
		WHERE s.run_id = $1 AND s.state IN ('running', 'waiting') RETURNING `+runs.AttemptColumns)
	letGoRun = pg.Define(pg.RoleLifecycle, "saga.let_go", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(), lease_until = mesh.clock()
		WHERE r.id = $1 AND r.fence = $2 AND r.owner = $3`)
	lockRuns = pg.Define(pg.RoleLifecycle, "saga.lock_runs", `
		SELECT FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) ORDER BY r.id FOR NO KEY UPDATE`)
	loseAttempts = pg.Define(pg.RoleLifecycle, "saga.lose_attempts", `
		UPDATE lifecycle.saga_step s SET `+lostAttempt+`, version = s.version + 1
		WHERE s.run_id = ANY ($1::uuid[]) AND s.state = 'running' RETURNING `+runs.AttemptColumns)
	// dropOpen takes back the attempts that a lease has just opened of runs that cannot be driven.
	dropOpen = pg.Define(pg.RoleLifecycle, "saga.drop_open", `
		UPDATE lifecycle.saga_run r SET open_attempt = 0, open_since = NULL
		WHERE r.id = ANY ($1::uuid[]) AND r.open_attempt > 0`)
	// useUpRange marks the rest of the runs' ranges as used.
	useUpRange = pg.Define(pg.RoleLifecycle, "saga.use_up_range", `
		UPDATE lifecycle.saga_run r SET op_seq = r.op_last WHERE r.id = ANY ($1::uuid[])`)
	// insertAttempts opens the next attempt of runs that were just leased.
	insertAttempts = pg.Define(pg.RoleLifecycle, "saga.open_attempts", `
		UPDATE lifecycle.saga_run r SET op_seq = mesh.next(r.op_seq), open_since = mesh.clock(),
			open_attempt = 1 + COALESCE((SELECT max(p.attempt) FROM lifecycle.saga_step p
				WHERE p.run_id = r.id AND p.step = r.step AND p.dir = r.phase), 0)
		WHERE r.id = ANY ($1::uuid[]) RETURNING r.id, r.op_seq, r.op_last, r.open_attempt, r.open_since`)
	// drawRange gives runs new ranges above everything that was drawn for their workspaces, and the open attempts the
	// first numbers of these.
	drawRange = pg.Define(pg.RoleLifecycle, "saga.draw_range", `
		WITH ws AS (UPDATE lifecycle.workspace w SET op_seq = mesh.next(w.op_seq) + `+strconv.Itoa(runs.RangeSize-1)+`
			FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND w.id = r.workspace_id RETURNING r.id, w.op_seq)
		UPDATE lifecycle.saga_run r SET op_seq = ws.op_seq - `+strconv.Itoa(runs.RangeSize-1)+`, op_last = ws.op_seq
		FROM ws WHERE r.id = ws.id RETURNING r.id, r.op_seq, r.op_last, r.open_attempt, r.open_since`)
)
