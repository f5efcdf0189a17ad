package workspace

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/reannounce"
)

// Announced returns the live rows that this package owns.
func Announced() []reannounce.Source {
	return []reannounce.Source{reannounce.Rows("workspaces", workspacesAfter,
		func(w Row) (events.Event, error) { return w.Event() })}
}
