package task

import (
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var tasksAfter = pg.Define(pg.RoleLifecycle, "task.tasks_after", `
	SELECT `+Columns+` FROM lifecycle.task t WHERE t.task_id > $1::uuid AND t.open ORDER BY t.task_id LIMIT $2`)

// Announced returns the open tasks. An announced task has no transitions: those are history.
func Announced() reannounce.Source {
	return reannounce.Rows("tasks", tasksAfter, func(r Record) (events.Event, error) {
		open, err := r.parse()
		if err != nil {
			return events.Event{}, err
		}
		e := open.Event()
		e.Payload = &lifecyclev1.TaskChanged{Task: open.Proto()}
		return e, nil
	})
}
