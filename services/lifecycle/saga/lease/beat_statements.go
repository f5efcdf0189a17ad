package lease

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of heartbeats.
var (
	beatRuns = pg.Define(pg.RoleLifecycle, "saga.beat_runs", `
		WITH h AS (
			SELECT r.id FROM lifecycle.saga_run r JOIN unnest($1::uuid[], $2::bigint[]) AS x (id, fence) ON r.id = x.id
				AND r.fence = x.fence
			WHERE r.owner = $3 FOR NO KEY UPDATE OF r SKIP LOCKED)
		UPDATE lifecycle.saga_run r SET lease_until = mesh.clock() + make_interval(secs => $4),
			next_at = mesh.clock() + make_interval(secs => $4),
			heartbeat_at = mesh.clock(), version = r.version + 1
		FROM h WHERE r.id = h.id RETURNING `+runs.Columns)
	beatSteps = pg.Define(pg.RoleLifecycle, "saga.beat_steps", `
		UPDATE lifecycle.saga_step s SET heartbeat_at = mesh.clock(), version = s.version + 1
		WHERE s.run_id = ANY ($1::uuid[]) AND s.state = 'running' RETURNING `+runs.AttemptColumns)
	beatRun = pg.Define(pg.RoleLifecycle, "saga.beat_run", `
		UPDATE lifecycle.saga_run r SET lease_until = mesh.clock() + make_interval(secs => $4),
			next_at = mesh.clock() + make_interval(secs => $4), heartbeat_at = mesh.clock()
		WHERE r.id = $1 AND r.fence = $2 AND r.owner = $3 RETURNING r.cancel_requested_at IS NOT NULL`)
	ownsRun = pg.Define(pg.RoleLifecycle, "saga.owns_run", `
		SELECT COALESCE(r.owner = $2, false) FROM lifecycle.saga_run r WHERE r.id = $1`)
	cancelledRuns = pg.Define(pg.RoleLifecycle, "saga.cancelled_runs", `
		SELECT r.id FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[]) AND r.cancel_requested_at IS NOT NULL`)
)
