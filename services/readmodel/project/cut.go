package project

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// This file is for a log whose beginning was cut. A replay then makes only the rows that the remaining events name, and
// these are compared and replaced. Of the others, rows that are over stay until the end of their own term, and live
// rows stay only if their owners have announced them.

// over has for each table the condition under which a row, as t, is over: its owner does not announce it again, and it
// stays. Tables without one have no rows that are over.
var over = map[string]string{
	"node":            "t.state = 'retired'",
	"gate":            "EXISTS (SELECT FROM readmodel.node n WHERE n.node_id = t.node_id AND n.state = 'retired')",
	"workspace":       "t.state = 'decommissioned'",
	"run":             "NOT t.live",
	"allocation":      "t.body->>'state' = 'ALLOCATION_STATE_RELEASED'",
	"instance":        "NOT t.live",
	"claim":           "t.released",
	"task":            "t.state NOT IN ('queued', 'dispatched', 'delivered', 'running')",
	"finding":         "NOT t.open",
	"recovery_record": "t.body->>'ended_at' IS NOT NULL",
	"incident":        "NOT t.open",
	"verdict": "t.node_id <> '00000000-0000-0000-0000-000000000000' AND NOT EXISTS (SELECT FROM readmodel.node n " +
		"WHERE n.node_id = t.node_id AND n.state <> 'retired')",
}

// unannounced has the tables whose rows no owner announces, each with the condition under which a row, as t, that the
// events make may be missing from the projection, because it was cut or pruned.
var unannounced = map[string]string{
	"session": "t.state = 'closed' OR NOT EXISTS (SELECT FROM readmodel.node n WHERE n.node_id = t.node_id)",
	"observed": "NOT EXISTS (SELECT FROM readmodel.workspace w WHERE w.workspace_id = t.workspace_id AND w.node_id = " +
		"t.node_id " +
		"AND w.state <> 'decommissioned')",
	"step":            "NOT EXISTS (SELECT FROM readmodel.run r WHERE r.run_id = t.run_id)",
	"task_transition": "NOT EXISTS (SELECT FROM readmodel.task k WHERE k.task_id = t.task_id)",
	"verdict_period": "t.body->>'ended_at' IS NOT NULL OR NOT EXISTS (SELECT FROM readmodel.node n " +
		"WHERE n.node_id = t.node_id)",
}

func overOf(name string) string {
	if condition, ok := over[name]; ok {
		return condition
	}
	return "false"
}

// missable returns the condition under which a row that the events make may be missing from the projection.
func missable(name string) string {
	if condition, ok := unannounced[name]; ok {
		return condition
	}
	return overOf(name)
}

// sameKey returns the SQL condition that the rows of a table under two aliases have the same key.
func sameKey(name, a, b string) string {
	var parts []string
	for _, column := range tables[name].key {
		parts = append(parts, a+"."+column+" = "+b+"."+column)
	}
	return strings.Join(parts, " AND ")
}

// sameRow returns the SQL condition that all columns are equal, except those that depend on more than the row's own
// event, such as the start of a session's service.
func sameRow(name, a, b string) string {
	var left, right []string
	for _, column := range columnsOf(tables[name]) {
		if _, ok := tables[name].set[column]; ok {
			continue
		}
		left, right = append(left, a+"."+column), append(right, b+"."+column)
	}
	return "(" + strings.Join(left, ", ") + ") IS NOT DISTINCT FROM (" + strings.Join(right, ", ") + ")"
}

var (
	compareReported = pg.DefineDynamic(pg.RoleReadmodel, "project.compare_reported", func(t target) string {
		return fmt.Sprintf(`WITH differs AS (
			SELECT t.*, EXISTS (SELECT FROM %[1]s r WHERE %[3]s) AS there FROM %[2]s t
			WHERE NOT EXISTS (SELECT FROM %[1]s r WHERE %[3]s AND %[4]s)
		), told AS (SELECT t.* FROM differs t WHERE t.there OR NOT (%[5]s))
		SELECT count(*) AS missing, count(*) FILTER (WHERE x.there) AS surplus, COALESCE(min(%[6]s), '') AS example
			FROM told x`,
			t.table(), target{scratchPrefix, t.name}.table(), sameKey(t.name, "r", "t"), sameRow(t.name, "r", "t"),
			missable(t.name), spelledKey(t.name))
	}, targets("")...)

	// keepServingSince copies the time since which a session serves, because the event that began it may have been cut.
	keepServingSince = pg.Define(pg.RoleReadmodel, "project.keep_serving_since", `
		UPDATE readmodel.scratch_session s SET since = t.since FROM readmodel.session t
		WHERE t.session_id = s.session_id AND t.serving = s.serving AND t.since < s.since`)

	dropReplaced = pg.DefineDynamic(pg.RoleReadmodel, "project.drop_replaced", func(t target) string {
		gone := fmt.Sprintf("EXISTS (SELECT FROM %s s WHERE %s AND NOT (%s))",
			target{scratchPrefix, t.name}.table(), sameKey(t.name, "s", "t"), sameRow(t.name, "s", "t"))
		if _, ok := unannounced[t.name]; !ok {
			gone += fmt.Sprintf(" OR NOT (%s) AND NOT EXISTS (SELECT FROM %s s WHERE %s)",
				overOf(t.name), target{scratchPrefix, t.name}.table(), sameKey(t.name, "s", "t"))
		}
		return "DELETE FROM " + t.table() + " t WHERE " + gone
	}, targets("")...)

	takeRebuilt = pg.DefineDynamic(pg.RoleReadmodel, "project.take_rebuilt", func(t target) string {
		columns := strings.Join(columnsOf(tables[t.name]), ", ")
		return fmt.Sprintf("INSERT INTO %s (%s) SELECT %s FROM %s ON CONFLICT DO NOTHING",
			t.table(), columns, columns, target{scratchPrefix, t.name}.table())
	}, targets("")...)

	emptyScratch = pg.DefineDynamic(pg.RoleReadmodel, "project.empty_scratch", func(t target) string {
		return "DELETE FROM " + t.table()
	}, targets(scratchPrefix)...)
)

// merge puts the rows of the scratch tables in the place of those that they replace, and deletes live rows that are in
// no scratch table. Rows that are over, or that no owner announces, stay if no scratch row replaces them.
func merge(ctx context.Context, tx pgx.Tx) error {
	if _, err := pg.Exec(ctx, tx, keepServingSince); err != nil {
		return fmt.Errorf("keep since when sessions serve: %w", err)
	}
	// Whether a gate or a verdict is over depends on the row of its node, so the rows of nodes are deleted last.
	names := TableNames()
	for _, name := range names {
		if name == "node" {
			continue
		}
		if _, err := pg.Exec(ctx, tx, dropReplaced.For(target{"", name})); err != nil {
			return fmt.Errorf("drop replaced rows of %s: %w", name, err)
		}
	}
	if _, err := pg.Exec(ctx, tx, dropReplaced.For(target{"", "node"})); err != nil {
		return fmt.Errorf("drop replaced nodes: %w", err)
	}
	for _, name := range names {
		if _, err := pg.Exec(ctx, tx, takeRebuilt.For(target{"", name})); err != nil {
			return fmt.Errorf("take rebuilt rows of %s: %w", name, err)
		}
		if _, err := pg.Exec(ctx, tx, emptyScratch.For(target{scratchPrefix, name})); err != nil {
			return fmt.Errorf("empty scratch of %s: %w", name, err)
		}
	}
	return nil
}
