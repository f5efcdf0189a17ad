package saga

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of a step's environment.
var (
	lockLeasedRun = pg.Define(pg.RoleLifecycle, "saga.lock_leased_run", `
		SELECT r.fence = $2 AND r.owner IS NOT NULL AND r.step = $3 AND r.phase = $4 AS leased,
			mesh.rolled_back() AS rolled_back
		FROM lifecycle.saga_run r WHERE r.id = $1 FOR SHARE`)
	readProgress = pg.Define(pg.RoleLifecycle, "saga.read_progress", `
		SELECT COALESCE(o.progress->>'note' = $6, false) AS reported, COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' AND `+runs.SameTry("p")+`
			ORDER BY p.attempt DESC LIMIT 1), true) AS new_of_try, COALESCE((
			SELECT p.progress->>'note' <> $6 FROM lifecycle.saga_step p
			WHERE p.run_id = s.run_id AND p.step = s.step AND p.dir = s.dir AND p.progress ? 'note' ORDER BY p.attempt DESC
				LIMIT 1), true) AS new_of_step
		FROM lifecycle.saga_run r
		CROSS JOIN LATERAL (SELECT r.id AS run_id, $3::int AS step, $4::text AS dir, $5::int AS attempt) s
		LEFT JOIN lifecycle.saga_step o ON o.run_id = s.run_id AND o.step = s.step AND o.dir = s.dir AND o.attempt = s.attempt
		WHERE r.id = $1 AND r.fence = $2 AND (o.state = 'running'
			OR o.run_id IS NULL AND r.step = s.step AND r.phase = s.dir AND r.open_attempt = s.attempt)`)
	progressRun = pg.Define(pg.RoleLifecycle, "saga.progress_run", `
		UPDATE lifecycle.saga_run r SET version = r.version + 1,
			progress_at = CASE WHEN $3 THEN mesh.clock() ELSE r.progress_at END,
			stuck_reason = CASE WHEN $4 AND r.stuck_reason NOT LIKE 'run_stalled%' THEN '' ELSE r.stuck_reason END
		WHERE r.id = $1 AND r.fence = $2 RETURNING `+runs.Columns)
	progressStep = pg.Define(pg.RoleLifecycle, "saga.progress_step", `
		UPDATE lifecycle.saga_step s SET progress_at = CASE WHEN $6 THEN mesh.clock() ELSE s.progress_at END,
			stalled = s.stalled AND NOT $6, version = s.version + 1, progress = jsonb_build_object('note', $5::text)
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4 AND s.state = 'running'
		RETURNING `+runs.AttemptColumns)
)
