package runs

import "github.com/gpuaas/mesh/internal/pg"

// Statements that read runs and their attempts.
var (
	runByID = pg.Define(pg.RoleLifecycle, "runs.by_id", `
		SELECT `+Columns+` FROM lifecycle.saga_run r WHERE r.id = $1`)
	liveRun = pg.Define(pg.RoleLifecycle, "runs.live", `
		SELECT `+Columns+` FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck')`)
	timeline = pg.Define(pg.RoleLifecycle, "runs.timeline", `
		SELECT `+AttemptColumns+` FROM lifecycle.saga_step s WHERE s.run_id = $1 ORDER BY s.op_seq, s.started_at`)
	openOfRun = pg.Define(pg.RoleLifecycle, "runs.open_of_run", `
		SELECT `+Columns+` FROM lifecycle.saga_run r WHERE r.id = $1 AND r.open_attempt > 0 AND NOT EXISTS (
			SELECT FROM lifecycle.saga_step s WHERE s.run_id = r.id AND s.step = r.step AND s.dir = r.phase
				AND s.attempt = r.open_attempt)`)
	lockLiveRun = pg.Define(pg.RoleLifecycle, "runs.lock_live", `
		SELECT FROM lifecycle.saga_run r
		WHERE r.workspace_id = $1 AND r.state IN ('pending', 'running', 'waiting', 'compensating',
			'stuck') FOR NO KEY UPDATE`)
	runsAfter = pg.Define(pg.RoleLifecycle, "runs.after", `
		SELECT `+Columns+` FROM lifecycle.saga_run r
		WHERE r.id > $1::uuid AND r.state IN ('pending', 'running', 'waiting', 'compensating', 'stuck') ORDER BY r.id
			LIMIT $2`)
)
