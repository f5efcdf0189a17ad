package saga

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/reannounce"
)

// Announced returns the live rows that this package owns. Attempts are not among them: they are history.
func Announced() []reannounce.Source {
	return []reannounce.Source{
		reannounce.Rows("workspaces", workspacesAfter, func(w Workspace) (events.Event, error) {
			return collected(func(j *eventBuffer) error { return j.workspace(&w) })
		}),
		reannounce.Rows("runs", runsAfter, func(r Run) (events.Event, error) {
			return collected(func(j *eventBuffer) error { j.run(&r); return nil })
		}),
	}
}

// collected returns the event that add puts into an event buffer for one row.
func collected(add func(*eventBuffer) error) (events.Event, error) {
	var j eventBuffer
	if err := add(&j); err != nil {
		return events.Event{}, err
	}
	return j.list[0], nil
}
