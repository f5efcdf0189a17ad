package lease

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

var formerStages = pg.Define(pg.RoleLifecycle, "saga.former_stages", `
		SELECT DISTINCT ON (s.run_id) `+pg.Columns[formerStage]("s")+` FROM lifecycle.saga_run r
		JOIN lifecycle.saga_step s ON s.run_id = r.id AND s.step = r.step AND s.dir = r.phase
		WHERE r.id = ANY ($1::uuid[]) AND s.stage <> '' ORDER BY s.run_id, s.attempt DESC`)

// formerStage is the stage that the earlier attempts at a run's present step have entered last.
type formerStage struct {
	RunID string `db:"run_id"`
	Stage string `db:"stage"`
}

// takeStages gives leased runs the stage to go on in, where it is not in the row of the open attempt: that attempt
// follows another one and has entered none yet.
func takeStages(ctx context.Context, tx pgx.Tx, leased []*Run) error {
	byID := map[string]*Run{}
	var again []string
	for _, h := range leased {
		if max(h.Attempt.Attempt, h.Run.OpenAttempt) > 1 && h.Attempt.Stage == "" {
			byID[h.Run.ID] = h
			again = append(again, h.Run.ID)
		}
	}
	if len(again) == 0 {
		return nil
	}
	found, err := pg.All[formerStage](ctx, tx, formerStages, again)
	if err != nil {
		return fmt.Errorf("read former stages: %w", err)
	}
	for _, f := range found {
		byID[f.RunID].Stage = f.Stage
	}
	return nil
}
