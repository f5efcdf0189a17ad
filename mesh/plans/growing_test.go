package plans_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/plans"
)

// growing is what tables of a fleet that grow are filled with, and the statements that read them.
type growing struct {
	what       string
	fill       []string // makes the tables, of which $1 rows grow; a text without $1 is run as it is
	statements []reading
}

// reading is a statement with the rows that its answer needs, and those that it returns or changes.
type reading struct {
	name             string
	args             []string
	needed, returned int64
}

const (
	standing = 200 // workspaces, runs and verdicts that an answer is about
	few      = 20  // rows that a statement may read beside those that its answer needs
	// idOf makes an id of a number, so that ids and numbers have the same order.
	idOf = `('00000000-0000-7000-8000-' || lpad((%s)::text, 12, '0'))::uuid`
)

// numbered returns an id as SQL, of the number that the SQL n returns.
func numbered(n string) string { return fmt.Sprintf(idOf, n) }

// nodes returns the literal of the ids of so many nodes that are gone.
func nodes(n int) string {
	var ids []string
	for i := range n {
		ids = append(ids, fmt.Sprintf("00000000-0000-7000-8000-%012d", 1000001+i))
	}
	return "'{" + strings.Join(ids, ",") + "}'"
}

// ofWatchedWorkspaces inserts workspaces, given their ids, state, placement and number.
const ofWatchedWorkspaces = `
	INSERT INTO recovery.watch_workspace (workspace_id, version, tenant_id, tenant, name, state, state_at, epoch,
		run_id, node_id, placement, register_failures, last_error_code, last_error)
	SELECT %s, 1, gen_random_uuid(), 't', 'w' || n, '%s', mesh.clock() - interval '2 days', 2, 'r' || n,
		gen_random_uuid(), '%s', 0, '', '' FROM generate_series(1, %s) n`

// watched returns a statement that inserts n workspaces whose ids are those of the numbers id.
func watched(id, state, placement, n string) string {
	return fmt.Sprintf(ofWatchedWorkspaces, numbered(id), state, placement, n)
}

var (
	observers = []string{
		`TRUNCATE nodeapi.observer, nodeapi.observation`,
		`INSERT INTO nodeapi.observer (node_id, generation, since)
			SELECT ` + numbered("n") + `, 1, mesh.clock() FROM generate_series(1, $1::int) n
			UNION ALL SELECT ` + numbered("1000000 + n") + `, 1, mesh.clock() - interval '4 days'
			FROM generate_series(1, $1::int) n`,
		`INSERT INTO nodeapi.observation (node_id, workspace_id, digest, body, written_at)
			SELECT r.node_id, gen_random_uuid(), '', '', mesh.clock() FROM nodeapi.observer r,
				generate_series(1, CASE WHEN r.since < mesh.clock() - interval '1 day' THEN 8 ELSE 1 END)`,
	}
	watchdog = []string{
		`TRUNCATE recovery.watch_workspace, recovery.watch_instance, recovery.watch_run`,
		watched("n", "active", "process", "$1::int"),
		watched("1000000 + n", "decommissioned", "process", "$1::int"),
		watched("2000000 + n", "failed", "process", "10"),
		`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement)
			SELECT w.workspace_id, e, 1, gen_random_uuid(), CASE WHEN e = 2 AND w.state = 'active' THEN 'live' ELSE 'ended' END,
				'process' FROM recovery.watch_workspace w, generate_series(1, 2) e`,
		`INSERT INTO recovery.watch_run (run_id, version, workspace_id, tenant_id, kind, state, phase, step, stalled,
				stuck_reason, attempt, attempt_ver, requester, parent_run, cancel_by, error_code, error, error_layer, created_at,
				finished_at)
			SELECT w.run_id || w.workspace_id, 1, w.workspace_id, w.tenant_id, 'recreate', 'succeeded', 'do', '', false, '', 1,
				1, '', '', '', '', '', '', w.state_at, w.state_at FROM recovery.watch_workspace w`,
	}
)

// kept fills the tables of the watchdog with rows that no round forgets: ended instances of the epochs that their
// workspaces have, sessions that a replica serves or that ended a short while ago, and sightings of the last day.
var kept = []string{
	`TRUNCATE recovery.watch_workspace, recovery.watch_instance, recovery.watch_session, recovery.class_sighting,
		mesh.replica`,
	watched("n", "failed", "process", "$1::int"),
	`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement)
		SELECT w.workspace_id, w.epoch, 1, gen_random_uuid(), 'ended', 'process' FROM recovery.watch_workspace w`,
	`INSERT INTO mesh.replica (service, replica_id, started_at, beat_at, listening_since, version)
		VALUES ('nodeapi', ` + numbered("1") + `, mesh.clock(), mesh.clock(), mesh.clock(), 1)`,
	`INSERT INTO recovery.watch_session (session_id, version, node_id, replica_id, generation, serving, since,
			close_reason)
		SELECT gen_random_uuid(), 1, ` + numbered("n") + `, CASE WHEN s THEN ` + numbered("1") + ` END, 1, s,
			mesh.clock() - CASE WHEN s THEN interval '9 days' ELSE interval '1 hour' END, ''
		FROM generate_series(1, $1::int) n, unnest(ARRAY[true, false]) s`,
	`INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		SELECT 'Mark active', 'x', 'r' || n, gen_random_uuid(), gen_random_uuid(), 'database',
			mesh.clock() - interval '1 hour' FROM generate_series(1, $1::int) n`,
}

// over adds 1,200 instances and sightings that are to be forgotten to those of kept: more than two batches.
var over = []string{
	watched("1000000 + n", "active", "process", "1200"),
	`INSERT INTO recovery.watch_instance (workspace_id, epoch, version, instance_id, state, placement)
		SELECT w.workspace_id, 1, 1, gen_random_uuid(), 'ended', 'process' FROM recovery.watch_workspace w
		WHERE w.state = 'active'`,
	`INSERT INTO recovery.class_sighting (step, error_code, run_id, workspace_id, tenant_id, error_layer, seen_at)
		SELECT 'Mark active', 'x', 'over' || n, gen_random_uuid(), gen_random_uuid(), 'database',
			mesh.clock() - interval '2 days' FROM generate_series(1, 1200) n`,
}

var growings = []growing{
	{
		what: "machines that are gone, of which a batch is deleted", fill: observers,
		statements: []reading{
			{name: "facts.lock_gone_observers", args: []string{"3600"}, needed: 100, returned: 100},
			{name: "facts.prune_observations", args: []string{nodes(100)}, needed: 2 * 800, returned: 800},
			{name: "facts.prune_observers", args: []string{nodes(100)}, needed: 100, returned: 100},
		},
	},
	{
		what: "nodes that never had a verdict, beside a page to announce",
		fill: []string{
			`DELETE FROM recovery.verdict`,
			`INSERT INTO recovery.verdict (node_id, reason, body, began, version)
				SELECT ` + numbered("n") + `, 'unspecified', '', 0, (n % ($1::int / 200) = 0)::int
				FROM generate_series(1, $1::int) n`,
		},
		statements: []reading{{
			name: "drift.verdicts_after", args: []string{"'00000000-0000-7000-8000-000000000000'", "500"},
			needed: standing, returned: standing,
		}},
	},
	{
		what: "ended workspaces and finished runs, beside those that are counted",
		fill: []string{
			`TRUNCATE readmodel.workspace, readmodel.run, readmodel.workspace_count`,
			`INSERT INTO readmodel.workspace (workspace_id, version, tenant_id, tenant, name, state, body)
				SELECT gen_random_uuid(), 1, ` + numbered("n % 10") + `, 't', 'w' || n,
					CASE WHEN n <= 200 THEN 'active' ELSE 'decommissioned' END, '{}' FROM generate_series(1, $1::int) n`,
			`INSERT INTO readmodel.run (run_id, version, workspace_id, tenant_id, live, body)
				SELECT gen_random_uuid(), 1, gen_random_uuid(), ` + numbered("n % 10") + `, n <= 200, '{}'
				FROM generate_series(1, $1::int) n`,
		},
		statements: []reading{{name: "project.compare_counts", needed: 2*standing + 10, returned: 1}},
	},
	{
		what: "audit entries and numbered batches of events, of which the ends are read",
		fill: []string{
			`TRUNCATE readmodel.audit, events.numbered`,
			`ALTER TABLE readmodel.audit DISABLE TRIGGER USER`,
			`INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
				SELECT n, n, gen_random_uuid(), 'readmodel', '{}', sha256((n - 1)::text::bytea), sha256(n::text::bytea)
				FROM generate_series(1, $1::int) n`,
			`ALTER TABLE events.numbered DISABLE TRIGGER USER, NO FORCE ROW LEVEL SECURITY`,
			`INSERT INTO events.numbered (seqs, oldest, xid, first_pos, last_pos, before, highest, open)
				SELECT int8multirange(int8range(n, n + 1)), pg_current_xact_id(), pg_current_xact_id(), n, n, n - 1, n,
					int8multirange(int8range(n + 1, NULL)) FROM generate_series(1, $1::int) n`,
			`ALTER TABLE events.numbered FORCE ROW LEVEL SECURITY`,
		},
		statements: []reading{{name: "auditlog.end_of_audit", args: []string{"'c'"}, needed: 6, returned: 1}},
	},
	{
		what: "facts of what has ended, of which a batch is forgotten", fill: watchdog,
		statements: []reading{
			{name: "watchdog.forget_ended_instances", needed: 3 * 500, returned: 500},
			{name: "watchdog.forget_runs", args: []string{"86400"}, needed: 3 * 500, returned: 500},
			{name: "watchdog.forget_workspaces", args: []string{"86400"}, needed: 4 * 500, returned: 500},
		},
	},
	{
		what: "facts that stay, of which none is to be forgotten", fill: kept,
		statements: []reading{
			{name: "watchdog.forget_ended_instances"},
			{name: "watchdog.forget_sightings"},
			{name: "watchdog.forget_sessions", args: []string{"86400"}, returned: 2}, // replicas, in its recursive part
		},
	},
	{
		what: "facts that stay, beside more than two batches that are to be forgotten", fill: slices.Concat(kept, over),
		statements: []reading{
			{name: "watchdog.forget_ended_instances", needed: 3 * 500, returned: 500},
			{name: "watchdog.forget_sightings", needed: 2 * 500, returned: 500},
		},
	},
}

// TestStatementsReadNoMoreOfATableThatHasGrown: with ten times as many rows of history, or of machines beside those
// that a batch is made of, a statement reads the rows that its answer needs, as before.
func TestStatementsReadNoMoreOfATableThatHasGrown(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	for _, g := range growings {
		for _, size := range []int{2000, 20000} {
			g.make(t, db, size)
			for _, s := range g.statements {
				cost := s.explain(t, db)
				if cost.Returned != s.returned {
					t.Fatalf("%s returns or changes %d rows, want %d; %d %s:\n%s", s.name, cost.Returned, s.returned, size, g.what,
						cost.Plan)
				}
				t.Logf("%s reads %d rows; %d %s", s.name, cost.Rows, size, g.what)
				if cost.Rows > s.needed+few {
					t.Errorf("%s reads %d rows and needs %d; %d %s:\n%s", s.name, cost.Rows, s.needed, size, g.what, cost.Plan)
				}
			}
		}
	}
}

// TestTheCountsOfTheFleetReadEachRowOnce: the comparison of the counts needs each workspace that is up. It reads each
// row of their table once and each count of a machine once, and compares each machine once, on a larger fleet too.
func TestTheCountsOfTheFleetReadEachRowOnce(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	const ended = 100
	g := growing{fill: []string{
		`TRUNCATE recovery.watch_workspace, recovery.watch_machine, recovery.watch_count`,
		watched("n", "active", "static", "$1::int"), // each on a machine of its own
		watched("1000000 + n", "decommissioned", "static", fmt.Sprint(ended)),
	}}
	for _, size := range []int{1000, 10000} {
		g.make(t, db, size)
		cost := reading{name: "fleet.compare_counts"}.explain(t, db)
		if most := int64(size + ended + 2*size + few); cost.Rows > most {
			t.Errorf("%d rows are read with %d workspaces, more than %d:\n%s", cost.Rows, size, most, cost.Plan)
		}
	}
}

// make fills the tables. A fill may take longer than the role's statements may, on a machine with other load.
func (g growing) make(t *testing.T, db *testkit.Database, size int) {
	t.Helper()
	conn, err := db.OwnerPool().Acquire(testkit.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(testkit.Context(t), `SET statement_timeout = 0`); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Conn().Close(testkit.Context(t)) }() // no other test gets it with that setting
	for _, sql := range append(slices.Clone(g.fill), `VACUUM ANALYZE`) {
		var args []any
		if strings.Contains(sql, "$1") {
			args = []any{size}
		}
		if _, err := conn.Exec(testkit.Context(t), sql, args...); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
}

// explain returns the cost of the statement.
func (r reading) explain(t *testing.T, db *testkit.Database) plans.Cost {
	t.Helper()
	all := pg.Statements()
	at := slices.IndexFunc(all, func(s *pg.Statement) bool { return s.Name() == r.name })
	if at < 0 {
		t.Fatalf("there is no statement %s", r.name)
	}
	cost, err := plans.Explain(testkit.Context(t), db.Pool(all[at].Roles()[0]), all[at], r.args)
	if err != nil {
		t.Fatal(err)
	}
	return cost
}
