package saga

import (
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Statements of Reset and Retry.
var (
	archiveRuns = pg.Define(pg.RoleLifecycle, "saga.archive_runs", `
		UPDATE lifecycle.saga_run r SET archived_at = mesh.clock() WHERE r.workspace_id = $1
			AND r.archived_at IS NULL`)
	listOpenAttempts = pg.Define(pg.RoleLifecycle, "saga.list_open_attempts", `
		SELECT format('attempt %s at %s the step "%s" of operation %s is open: it is %s', s.attempt,
			CASE s.dir WHEN 'do' THEN 'doing' ELSE 'undoing' END, s.name, s.run_id, s.state)
		FROM lifecycle.saga_step s JOIN lifecycle.saga_run r ON r.id = s.run_id
		WHERE r.workspace_id = $1 AND s.state IN ('running', 'waiting') ORDER BY s.op_seq LIMIT 10`)
	formerRunsOf = pg.Define(pg.RoleLifecycle, "saga.former_runs", `
		SELECT `+runs.Columns+` FROM lifecycle.saga_run r WHERE r.workspace_id = $1 ORDER BY r.created_at DESC, r.id DESC
			LIMIT 2`)
)
