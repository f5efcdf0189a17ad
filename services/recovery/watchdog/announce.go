package watchdog

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var recordsAfter = pg.Define(pg.RoleRecovery, "watchdog.records_after", `
	SELECT `+pg.Columns[recordRow]("c")+` FROM recovery.recovery_record c
	WHERE c.record_id > $1::uuid AND c.ended_at IS NULL ORDER BY c.record_id LIMIT $2`)

// Announced returns the source that announces the open records again.
func Announced() []reannounce.Source {
	return []reannounce.Source{
		reannounce.Rows("recoveries", recordsAfter, func(row recordRow) (events.Event, error) {
			r, err := row.read()
			if err != nil {
				return events.Event{}, err
			}
			return r.event(), nil
		}),
	}
}
