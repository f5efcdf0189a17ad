package workspace

import "github.com/gpuaas/mesh/internal/pg"

// Statements of a workspace's row.
var (
	quarantineWorkspace = pg.Define(pg.RoleLifecycle, "workspace.mark_unreadable", `
		UPDATE lifecycle.workspace w SET state = 'stuck', state_at = mesh.clock(),
			last_error_code = 'unreadable', last_error = $2,
			version = w.version + 1
		WHERE w.id = (SELECT r.workspace_id FROM lifecycle.saga_run r WHERE r.id = $1) AND w.run_id = $1`)
	workspaceByID = pg.Define(pg.RoleLifecycle, "workspace.by_id", `
		SELECT `+Columns+` FROM lifecycle.workspace w WHERE w.id = $1`)
	touchWorkspacesOf = pg.Define(pg.RoleLifecycle, "workspace.touch", `
		UPDATE lifecycle.workspace w SET state = COALESCE(NULLIF(x.state, ''), w.state),
			state_at = CASE WHEN x.state IN ('', w.state) THEN w.state_at ELSE mesh.clock() END,
			last_error_code = x.code, last_error = x.err, version = w.version + 1
		FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::text[]) AS x (id, run_id, state, code, err)
		WHERE w.id = x.id AND w.run_id = x.run_id RETURNING `+Columns)
	insertWorkspace = pg.Define(pg.RoleLifecycle, "workspace.insert", `
		INSERT INTO lifecycle.workspace (id, tenant_id, name, spec, spec_digest, state, created_by)
		VALUES ($1, $2, $3, $4, $5, 'provisioning', $6)`)
	resetWorkspace = pg.Define(pg.RoleLifecycle, "workspace.reset", `
		UPDATE lifecycle.workspace w SET reset_done = true, version = w.version + 1
		WHERE w.id = $1 AND w.state = 'failed' AND NOT w.reset_done`)
	workspacesAfter = pg.Define(pg.RoleLifecycle, "workspace.after", `
		SELECT `+Columns+` FROM lifecycle.workspace w WHERE w.id > $1::uuid AND w.state <> 'decommissioned' ORDER BY w.id
			LIMIT $2`)
)
