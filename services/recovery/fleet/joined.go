package fleet

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// fewRows is the number of rows up to which any plan of a join is good enough.
const fewRows = 100

var (
	planJoin = pg.Define(pg.RoleRecovery, "fleet.plan_join", `
		SELECT set_config('plan_cache_mode', 'force_custom_plan', true), set_config('enable_nestloop', 'off', true)`)
	planAsBefore = pg.Define(pg.RoleRecovery, "fleet.plan_as_before", `
		SELECT set_config('plan_cache_mode', NULL, true), set_config('enable_nestloop', NULL, true)`)
)

// Joined runs write, an UPDATE that joins a table with as many rows of arrays, and has it planned without nested loops.
// The plan of a prepared statement is made when few rows are written at a time. If the rows of the whole fleet come
// then, before the table is analyzed, it compares each of them with each row of the table.
func Joined(ctx context.Context, tx pgx.Tx, rows int, write func() error) error {
	if rows <= fewRows {
		return write()
	}
	if err := pg.Queue(ctx, tx, planJoin); err != nil {
		return err
	}
	if err := write(); err != nil {
		return err
	}
	return pg.Queue(ctx, tx, planAsBefore)
}
