package allocation

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var (
	allocationsAfter = pg.Define(pg.RoleLifecycle, "allocation.allocations_after", `
		SELECT `+Columns+` FROM lifecycle.allocation a
		WHERE a.allocation_id > $1::uuid AND a.state <> 'released' ORDER BY a.allocation_id LIMIT $2`)
	instancesAfter = pg.Define(pg.RoleLifecycle, "allocation.instances_after", `
		SELECT `+InstanceColumns+` FROM lifecycle.instance i
		WHERE i.instance_id > $1::uuid AND i.state <> 'ended' ORDER BY i.instance_id LIMIT $2`)
	unaccountedAfter = pg.Define(pg.RoleLifecycle, "allocation.unaccounted_after", `
		SELECT `+unaccountedColumns+` FROM lifecycle.unaccounted_instance u
		WHERE u.instance_id > $1::uuid AND u.state <> 'ended' ORDER BY u.instance_id LIMIT $2`)
)

// Announced returns the sources of the live rows that this package owns.
func Announced() []reannounce.Source {
	return []reannounce.Source{
		reannounce.Rows("allocations", allocationsAfter, func(d storedAllocation) (events.Event, error) {
			a, err := d.allocation()
			return a.Event(), err
		}),
		reannounce.Rows("instances", instancesAfter, func(d storedInstance) (events.Event, error) {
			i, err := d.instance()
			return i.Event(), err
		}),
		reannounce.Rows("unaccounted", unaccountedAfter, func(d storedInstance) (events.Event, error) {
			i, err := d.instance()
			return UnaccountedEvent(i), err
		}),
	}
}
