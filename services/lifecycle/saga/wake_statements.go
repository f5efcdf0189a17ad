package saga

import "github.com/gpuaas/mesh/internal/pg"

// Statements that wake runs, and of the rest without any.
var (
	anyLive = pg.Define(pg.RoleLifecycle, "saga.any_live", `
		SELECT EXISTS (SELECT 1 FROM lifecycle.saga_run r
			WHERE r.state IN ('pending', 'running', 'waiting', 'compensating'))`)
	wakeRuns             = pg.Define(pg.RoleLifecycle, "saga.wake_runs", wakeSQL("id"))
	wakeRunsOfWorkspaces = pg.Define(pg.RoleLifecycle, "saga.wake_runs_of_workspaces", wakeSQL("workspace_id"))
)
