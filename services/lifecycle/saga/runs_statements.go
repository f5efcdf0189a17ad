package saga

import "github.com/gpuaas/mesh/internal/pg"

// Statements that read runs and their attempts.
var (
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
	runsByID = pg.Define(pg.RoleLifecycle, "saga.runs_by_id", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r WHERE r.id = ANY ($1::uuid[])`)
	lockLiveRun = pg.Define(pg.RoleLifecycle, "saga.lock_live_run", `
		SELECT FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating',
			'stuck') FOR NO KEY UPDATE`)
	runsAfter = pg.Define(pg.RoleLifecycle, "saga.runs_after", `
		SELECT `+runColumns+` FROM lifecycle.saga_run r
		WHERE r.id > $1::uuid AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck') ORDER BY r.id LIMIT $2`)
)
