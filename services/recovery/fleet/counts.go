package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
)

// CompareEvery is how often the counts of the fleet are compared with the rows that they count.
const CompareEvery = time.Hour

// CountDifference is the difference between the counts of the fleet, which triggers keep, and the rows that they count.
type CountDifference struct {
	Placements int64 `db:"placements"` // placements whose number of workspaces or units differs
	Machines   int64 `db:"machines"`   // machines whose number of workspaces differs
	Kept       int64 `db:"kept"`       // units, by the counts
	Counted    int64 `db:"counted"`    // units, by the rows
}

// compareFleet counts the counts that differ from what recovery.recount_fleet would write; a count of zero equals no
// count. Rows and counts are read as of one moment, since each transaction writes both.
var compareFleet = pg.Define(pg.RoleRecovery, "fleet.compare_counts", `
	WITH place AS MATERIALIZED (
		SELECT w.placement, w.node_id, count(*) AS workspaces
		FROM recovery.watch_workspace w WHERE w.state IN ('provisioning', 'active', 'recreating') GROUP BY 1, 2
	), counted AS (
		SELECT p.placement, sum(p.workspaces)::int AS workspaces, sum(CASE WHEN p.placement = 'static'
			AND p.node_id IS NOT NULL THEN 1 ELSE p.workspaces END)::int AS units
		FROM place p GROUP BY 1
	), kept AS (
		SELECT c.placement, c.workspaces, c.units FROM recovery.watch_count c WHERE (c.workspaces, c.units) <> (0, 0)
	), machine AS (
		SELECT p.node_id, p.workspaces::int AS workspaces FROM place p
		WHERE p.placement = 'static' AND p.node_id IS NOT NULL
	), placements AS (
		SELECT x.placement FROM (SELECT * FROM counted EXCEPT SELECT * FROM kept) x
		UNION SELECT x.placement FROM (SELECT * FROM kept EXCEPT SELECT * FROM counted) x
	), machines AS (
		SELECT coalesce(a.node_id, b.node_id) FROM machine a FULL JOIN recovery.watch_machine b USING (node_id)
		WHERE a.workspaces IS DISTINCT FROM b.workspaces
	)
	SELECT (SELECT count(*) FROM placements) AS placements, (SELECT count(*) FROM machines) AS machines,
		(SELECT coalesce(sum(k.units), 0) FROM kept k) AS kept, (SELECT coalesce(sum(c.units), 0) FROM counted c) AS counted`)

var recountFleet = pg.Define(pg.RoleRecovery, "fleet.recount_counts", `SELECT recovery.recount_fleet()`)

// RepairCounts compares the counts of the fleet with their rows, and recounts if they differ. A difference is logged as
// an error and recorded in the audit log, since the brake has compared failures with a wrong size of the fleet.
func RepairCounts(ctx context.Context, pool *pgxpool.Pool, logger *slog.Logger) (CountDifference, error) {
	found, err := pg.One[CountDifference](ctx, pool, compareFleet)
	if err != nil {
		return found, fmt.Errorf("compare the counts of the fleet: %w", err)
	}
	if found.Placements+found.Machines == 0 {
		return found, nil
	}
	err = pg.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		if _, err := pg.Exec(ctx, tx, recountFleet); err != nil {
			return fmt.Errorf("count the fleet anew: %w", err)
		}
		_, err := audit.Record(ctx, tx, audit.Entry{
			Action: "fleet.recount", Reason: "the counts of the fleet were not those of its workspaces", SubjectType: "brake",
			SubjectID: "fleet",
			Details: map[string]any{
				"placements": found.Placements, "machines": found.Machines, "kept": found.Kept,
				"counted": found.Counted,
			},
		})
		return err
	})
	if err != nil {
		return found, err
	}
	logger.ErrorContext(ctx, "the counts of the fleet were wrong and are made anew",
		slog.Int64("placements", found.Placements), slog.Int64("machines", found.Machines), slog.Int64("kept", found.Kept),
		slog.Int64("counted", found.Counted))
	return found, nil
}
