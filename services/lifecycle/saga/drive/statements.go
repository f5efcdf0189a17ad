package drive

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of single runs that a driver drives.
var (
	// knowsLater selects whether the workspace has an operation number or an epoch above those of a run.
	knowsLater = pg.Define(pg.RoleLifecycle, "saga.knows_later", `
		SELECT EXISTS (SELECT FROM lifecycle.workspace w WHERE w.id = $1 AND (w.op_seq > $2 OR w.epoch > $3))`)
	lockForRows = pg.Define(pg.RoleLifecycle, "saga.lock_for_rows", `
		SELECT r.fence FROM lifecycle.saga_run r JOIN lifecycle.workspace w ON w.id = r.workspace_id WHERE r.id = $1
		FOR NO KEY UPDATE OF r, w`)
	pauseRun = pg.Define(pg.RoleLifecycle, "saga.pause", `
		INSERT INTO lifecycle.run_pause AS p (run_id, since) VALUES ($1, mesh.clock())
		ON CONFLICT (run_id) DO UPDATE SET since = COALESCE(p.since, mesh.clock())`)
	attemptByKey = pg.Define(pg.RoleLifecycle, "saga.attempt_by_key", `
		SELECT `+runs.AttemptColumns+` FROM lifecycle.saga_step s
		WHERE s.run_id = $1 AND s.step = $2 AND s.dir = $3 AND s.attempt = $4`)
)
