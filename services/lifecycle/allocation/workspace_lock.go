package allocation

import (
	"github.com/gpuaas/mesh/internal/pg"
)

var LockWorkspace = pg.Define(pg.RoleLifecycle, "allocation.lock_workspace",
	`SELECT 1 FROM lifecycle.workspace WHERE id = $1 FOR UPDATE`)
