package workspace

import (
	"github.com/gpuaas/mesh/internal/pg"
)

var lockWorkspace = pg.Define(pg.RoleLifecycle, "workspace.lock_workspace",
	`SELECT 1 FROM lifecycle.workspace WHERE id = $1 FOR UPDATE`)
