package allocation

import (
	"github.com/gpuaas/mesh/internal/pg"
)

// LockWorkspace locks the row of a workspace.
var LockWorkspace = pg.Define(pg.RoleLifecycle, "allocation.lock_workspace",
	`SELECT 1 FROM lifecycle.workspace WHERE id = $1 FOR UPDATE`)
