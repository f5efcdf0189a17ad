package runs

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/reannounce"
)

// Announced returns the live rows that this package owns. Attempts are not among them: they are history.
func Announced() []reannounce.Source {
	return []reannounce.Source{reannounce.Rows("runs", runsAfter, func(r Run) (events.Event, error) {
		var buffer Buffer
		buffer.Run(&r)
		return buffer.list[0], nil
	})}
}
