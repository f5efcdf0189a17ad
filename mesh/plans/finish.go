package plans

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

var (
	asProduct = pg.Define(pg.RoleOwner, "plans.write_as_the_product",
		`SELECT set_config('gpuaas.writer', 'product', false)`)
	withoutKeys = pg.Define(pg.RoleOwner, "plans.without_foreign_keys",
		`SELECT set_config('session_replication_role', 'replica', false)`)
	// The slots of the machines, and how many are used, as the triggers would keep them.
	giveSlots = pg.Define(pg.RoleOwner, "plans.give_slots",
		`UPDATE lifecycle.node_gate SET slots = $1 WHERE instance_id IS NULL`)
	countRoom = pg.Define(pg.RoleOwner, "plans.count_room", `
	UPDATE lifecycle.node_room r SET slots = x.slots, used = x.used
	FROM (SELECT g.node_id, g.slots, count(a.node_id)::int AS used FROM lifecycle.node_gate g
		LEFT JOIN lifecycle.allocation a ON a.node_id = g.node_id AND a.state <> 'released' GROUP BY 1, 2) x
	WHERE x.node_id = r.node_id`)
	countWorkspaces = pg.Define(pg.RoleOwner, "plans.count_workspaces", `SELECT readmodel.recount_workspaces()`)
	countFleet      = pg.Define(pg.RoleOwner, "plans.count_fleet", `SELECT recovery.recount_fleet()`)
	numberEvents    = pg.Define(pg.RoleOwner, "plans.number_events", `
	INSERT INTO events.numbered (seqs, oldest, xid, first_pos, last_pos, before, highest, open)
	SELECT int8multirange(int8range(lo, hi, '[]')), pg_current_xact_id(), pg_current_xact_id(), base + lo, base + hi,
		lo - 1, hi, int8multirange(int8range(hi + 1, NULL))
	FROM (SELECT min(e.seq) AS lo, max(e.seq) AS hi FROM events.event e GROUP BY e.seq / 100) x, (SELECT era << 40 AS base
		FROM mesh.era) y`)
	restartEvents = pg.Define(pg.RoleOwner, "plans.restart_events",
		`SELECT setval(pg_get_serial_sequence('events.event', 'seq'), greatest((SELECT max(seq) FROM events.event), 1))`)
	// Replicas that beat for a day, so that the sessions of the fleet stand.
	beat = pg.Define(pg.RoleOwner, "plans.beat",
		`UPDATE mesh.replica SET beat_at = mesh.clock() + interval '1 day'`)
	readLaunchLog = pg.Define(pg.RoleOwner, "plans.read_launch_log",
		`UPDATE lifecycle.launch_log SET seq = $1 WHERE placement = 'process'`)
	markSeeded = pg.Define(pg.RoleOwner, "plans.mark_seeded",
		`INSERT INTO mesh.seeded (seeded_by) VALUES ('gpuaas bench')`)
	cursorsToEnd = pg.DefineDynamic(pg.RoleOwner, "plans.cursors_to_end", func(schema string) string {
		return `UPDATE ` + schema + `.event_cursor SET pos = coalesce((SELECT max(last_pos) FROM events.numbered), 0)`
	}, "lifecycle", "recovery", "readmodel", "nodeapi")
)

// finish sets the counts and numbers that span all copies, and makes the statistics of the planner.
func (t *Template) finish(ctx context.Context, conn *pgx.Conn, size Size) error {
	type call struct {
		statement *pg.Statement
		args      []any
	}
	calls := []call{
		{giveSlots, []any{size.slots()}},
		{countRoom, nil},
		{countWorkspaces, nil},
		{countFleet, nil},
		{numberEvents, nil},
		{restartEvents, nil},
	}
	for _, schema := range []string{"lifecycle", "recovery", "readmodel", "nodeapi"} {
		calls = append(calls, call{cursorsToEnd.For(schema), nil})
	}
	calls = append(calls, call{beat, nil})
	if t.instances {
		calls = append(calls, call{readLaunchLog, []any{t.launchLines(size)}})
	}
	for _, c := range calls {
		if _, err := pg.Exec(ctx, conn, c.statement, c.args...); err != nil {
			return fmt.Errorf("settle the fleet: %s: %w", c.statement.Name(), err)
		}
	}
	if _, err := conn.PgConn().Exec(ctx, "VACUUM (ANALYZE)").ReadAll(); err != nil {
		return fmt.Errorf("analyze the fleet: %w", err)
	}
	return nil
}
