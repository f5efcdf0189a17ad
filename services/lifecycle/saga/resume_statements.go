package saga

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of runs that go on after rollback mode.
var (
	anyPaused = pg.Define(pg.RoleLifecycle, "saga.any_paused", `
		SELECT NOT mesh.rolled_back() AND EXISTS (SELECT 1 FROM lifecycle.run_pause p WHERE p.since IS NOT NULL)`)
	endPauses = pg.Define(pg.RoleLifecycle, "saga.end_pauses", `
		WITH due AS (SELECT r.id, mesh.clock() - p.since AS stood FROM lifecycle.saga_run r
			JOIN lifecycle.run_pause p ON p.run_id = r.id
			WHERE r.id = ANY ($1::uuid[]) AND p.since IS NOT NULL AND NOT mesh.rolled_back()
				ORDER BY r.id FOR NO KEY UPDATE OF r SKIP LOCKED)
		UPDATE lifecycle.run_pause p SET since = NULL, total = p.total + due.stood FROM due
		WHERE p.run_id = due.id AND p.since IS NOT NULL RETURNING p.run_id::text,
			extract(epoch FROM due.stood)::float8 AS seconds`)
	pausedRuns = pg.Define(pg.RoleLifecycle, "saga.paused_runs", `
		SELECT p.run_id FROM lifecycle.run_pause p JOIN lifecycle.saga_run r ON r.id = p.run_id
		WHERE p.since IS NOT NULL AND NOT mesh.rolled_back() ORDER BY p.run_id LIMIT $1`)
	extendRuns = pg.Define(pg.RoleLifecycle, "saga.move_on_runs", `
		UPDATE lifecycle.saga_run r SET next_at = mesh.clock(),
			deadline_at = r.deadline_at + make_interval(secs => x.stood),
			tried_since = r.tried_since + make_interval(secs => x.stood), progress_at = mesh.clock(),
			why_waiting = 'waiting for a worker: rollback mode is over', version = r.version + 1
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE r.id = x.run_id AND r.state IN ('pending', 'waiting', 'compensating') RETURNING `+runs.Columns)
	extendAttempts = pg.Define(pg.RoleLifecycle, "saga.move_on_attempts", `
		UPDATE lifecycle.saga_step s SET deadline_at = s.deadline_at + make_interval(secs => x.stood),
			progress_at = mesh.clock(),
			why_waiting = 'waiting for a worker: rollback mode is over', version = s.version + 1
		FROM unnest($1::uuid[], $2::float8[]) AS x (run_id, stood)
		WHERE s.run_id = x.run_id AND s.state = 'waiting' RETURNING `+runs.AttemptColumns)
)
