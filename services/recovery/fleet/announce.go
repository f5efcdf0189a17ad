package fleet

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

var incidentsAfter = pg.Define(pg.RoleRecovery, "fleet.incidents_after", `
	SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i
	WHERE i.incident_id > $1::uuid AND i.closed_at IS NULL ORDER BY i.incident_id LIMIT $2`)

// Announced returns the sources that announce again the open incidents, including those of other parts of recovery, and
// the brake.
func Announced() []reannounce.Source {
	return []reannounce.Source{
		{Name: "incidents", Page: func(ctx context.Context, tx pgx.Tx, after string, most int) ([]events.Event, error) {
			rows, err := pg.All[incidentRow](ctx, tx, incidentsAfter, after, most)
			if err != nil {
				return nil, fmt.Errorf("read incidents: %w", err)
			}
			out := make([]events.Event, len(rows))
			for i := range rows {
				if err := rows[i].unread(); err != nil {
					return nil, err
				}
				out[i] = incident.Event(rows[i].read(ctx).Proto())
			}
			return out, nil
		}},
		{Name: "brake", Page: func(ctx context.Context, tx pgx.Tx, after string, _ int) ([]events.Event, error) {
			if !ids.Valid(after) { // it has been announced, and is one
				return nil, nil
			}
			b, err := readBrake(ctx, tx, true)
			if err != nil || b.Version == 0 {
				return nil, err
			}
			return []events.Event{b.event()}, nil
		}},
	}
}
