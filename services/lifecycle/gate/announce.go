package gate

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var gatesAfter = pg.Define(pg.RoleLifecycle, "gate.gates_after", `
	SELECT `+columns+` FROM lifecycle.node_gate g WHERE g.node_id > $1::uuid ORDER BY g.node_id LIMIT $2`)

// Announced returns the rows that this package owns.
func Announced() reannounce.Source {
	return reannounce.Rows("gates", gatesAfter, func(r row) (events.Event, error) {
		g, err := r.gate()
		return g.event(), err
	})
}
