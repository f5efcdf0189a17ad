package finding

import (
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/reannounce"
)

var findingsAfter = pg.Define(pg.RoleLifecycle, "finding.findings_after", `
	SELECT `+Columns+` FROM lifecycle.finding f
	WHERE f.finding_id > $1::uuid AND f.resolved_at IS NULL ORDER BY f.finding_id LIMIT $2`)

// Announced returns the open findings.
func Announced() reannounce.Source {
	return reannounce.Rows("findings", findingsAfter, func(d Stored) (events.Event, error) {
		f, err := d.Finding()
		if err != nil {
			return events.Event{}, err
		}
		return f.event()
	})
}
