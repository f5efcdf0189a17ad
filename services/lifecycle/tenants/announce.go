package tenants

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var tenantsAfter = pg.Define(pg.RoleLifecycle, "tenants.tenants_after",
	`SELECT `+tenantColumns+` FROM lifecycle.tenant t WHERE t.id > $1::uuid ORDER BY t.id LIMIT $2`)

// Announced returns the source of the rows of tenants.
func Announced() reannounce.Source {
	return reannounce.Rows("tenants", tenantsAfter, func(d storedTenant) (events.Event, error) {
		t := d.tenant()
		return t.event(), nil
	})
}
