package stall

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of stalls.
var (
	findStalls = pg.Define(pg.RoleLifecycle, "stall.find", `
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
	flagRun = pg.Define(pg.RoleLifecycle, "stall.flag_run", `
		UPDATE lifecycle.saga_run r SET stuck_reason = $4, version = r.version + 1
		WHERE r.id = $1 AND r.step = $2 AND r.phase = $3 AND r.state IN ('pending', 'running', 'waiting', 'compensating')
			AND ($5 > 0 OR r.stuck_reason = '') RETURNING `+runs.Columns)
	flagAttempt = pg.Define(pg.RoleLifecycle, "stall.flag_attempt", `
		UPDATE lifecycle.saga_step s SET stalled = true, version = s.version + 1
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state IN ('running', 'waiting')
			AND NOT s.stalled
			AND `+quietSince+` + make_interval(secs => $5) < mesh.clock() RETURNING `+runs.AttemptColumns)
)
