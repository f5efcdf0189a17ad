package project

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/internal/pg"
)

// table describes how one kind of aggregate is stored. The first columns are its key; every table also has `version`,
// unless it is immutable, and `body`.
type table struct {
	name    string
	key     []string
	columns []string // without the key, version and body
	// set replaces `column = EXCLUDED.column` at an update; t is the row as it was.
	set map[string]string
	// immutable rows are written once.
	immutable bool
	// returning is what an upsert returns of each row that it wrote; empty: nothing.
	returning string
}

// tables has every projected table, by name.
var tables = map[string]table{
	"node": {name: "node", key: []string{"node_id"}, columns: []string{"name", "state", "tenant_id"}},
	"gate": {name: "gate", key: []string{"node_id"}},
	"session": {
		name: "session", key: []string{"session_id"},
		columns: []string{"node_id", "replica_id", "generation", "state", "serving", "since"},
		set:     map[string]string{"since": "CASE WHEN t.serving = EXCLUDED.serving THEN t.since ELSE EXCLUDED.since END"},
	},
	"tenant": {name: "tenant", key: []string{"tenant_id"}, columns: []string{"name"}},
	"workspace": {
		name: "workspace", key: []string{"workspace_id"}, columns: []string{
			"tenant_id", "tenant", "name", "state", "node_id",
		},
	},
	"run": {name: "run", key: []string{"run_id"}, columns: []string{"workspace_id", "tenant_id", "live"}},
	"step": {
		name: "step", key: []string{"run_id", "step", "direction", "attempt"}, columns: []string{"workspace_id", "stalled"},
	},
	"allocation": {name: "allocation", key: []string{"allocation_id"}, columns: []string{"workspace_id", "tenant_id"}},
	"instance":   {name: "instance", key: []string{"instance_id"}, columns: []string{"workspace_id", "tenant_id", "live"}},
	"claim": {
		name: "claim", key: []string{"claim_id"}, columns: []string{"workspace_id", "tenant_id", "released", "orphaned"},
	},
	"task": {
		name: "task", key: []string{"task_id"}, columns: []string{
			"node_id", "workspace_id", "tenant_id", "state", "expires_at",
		},
	},
	"finding": {
		name: "finding", key: []string{"finding_id"}, columns: []string{"workspace_id", "tenant_id", "severity", "open"},
	},
	"recovery_record": {
		name: "recovery_record", key: []string{"record_id"}, columns: []string{"workspace_id", "tenant_id", "detected_at"},
	},
	"incident": {name: "incident", key: []string{"incident_id"}, columns: []string{"open"}},
	"brake":    {name: "brake", key: []string{"name"}, columns: []string{"engaged"}},
	"verdict":  {name: "verdict", key: []string{"node_id"}},
	"verdict_period": {
		name: "verdict_period", key: []string{"period_id"}, columns: []string{"node_id"},
	},
	"observed": {name: "observed", key: []string{"workspace_id", "node_id"}, returning: "t.workspace_id::text"},
	"task_transition": {
		name: "task_transition", key: []string{"task_id", "version", "n"}, immutable: true,
	},
}

// TableNames returns the names of the tables in order, so that locks are taken in one order.
func TableNames() []string {
	return slices.Sorted(maps.Keys(tables))
}

// scratchPrefix is the prefix of the names of the tables in which a rebuild is made for comparison.
const scratchPrefix = "scratch_"

// statements are the upserts into one set of tables.
type statements struct {
	upserts map[string]*pg.Statement
	prune   *pg.Statement // of the sessions of a node
	fade    *pg.Statement // of the observations of workspaces
}

// target is a table of a set.
type target struct{ prefix, name string }

func (t target) table() string { return "readmodel." + t.prefix + t.name }

// targets returns the tables of all the given sets.
func targets(sets ...string) []target {
	var all []target
	for _, prefix := range sets {
		for _, name := range TableNames() {
			all = append(all, target{prefix, name})
		}
	}
	return all
}

var (
	upsertRow = pg.DefineDynamic(pg.RoleReadmodel, "project.upsert",
		func(t target) string { return upsertSQL(tables[t.name], t.table()) },
		targets("", scratchPrefix)...)
	emptyTable = pg.DefineDynamic(pg.RoleReadmodel, "project.empty_table",
		func(t target) string { return "DELETE FROM " + t.table() }, targets("")...)

	// pruneSessions deletes closed sessions of nodes beyond the newest sessionsKept of each: they have no bearing on the
	// node's state.
	pruneSessions = pg.DefineDynamic(pg.RoleReadmodel, "project.prune_sessions", func(t target) string {
		return fmt.Sprintf(`DELETE FROM %[1]s o WHERE o.session_id = ANY (ARRAY(
		SELECT x.session_id FROM unnest($1::uuid[]) AS n (node_id), LATERAL (
			SELECT k.session_id, k.state FROM %[1]s k WHERE k.node_id = n.node_id
			ORDER BY k.generation DESC, k.version DESC, k.session_id DESC OFFSET %[2]d) x
		WHERE x.state = 'closed'))`,
			t.table(), sessionsKept)
	}, target{"", "session"}, target{scratchPrefix, "session"})

	// fadeObservations deletes the reports of earlier nodes of workspaces, each of which is on one node at a time. The
	// report of a workspace's own node stays, however many others have reported since, because an agent does not repeat a
	// report that has not changed.
	fadeObservations = pg.DefineDynamic(pg.RoleReadmodel, "project.fade_observations", func(t target) string {
		return fmt.Sprintf(`DELETE FROM %[1]s o WHERE o.ctid = ANY (ARRAY(
		SELECT x.ctid FROM unnest($1::uuid[]) AS n (workspace_id), LATERAL (
			SELECT k.ctid, k.node_id FROM %[1]s k WHERE k.workspace_id = n.workspace_id
			ORDER BY k.version DESC, k.node_id OFFSET %[2]d) x
		WHERE NOT EXISTS (SELECT FROM %[3]s w WHERE w.workspace_id = n.workspace_id AND w.node_id = x.node_id)))`,
			t.table(), observationsKept, target{t.prefix, "workspace"}.table())
	}, target{"", "observed"}, target{scratchPrefix, "observed"})
)

func newStatements(prefix string) statements {
	s := statements{
		upserts: map[string]*pg.Statement{},
		prune:   pruneSessions.For(target{prefix, "session"}), fade: fadeObservations.For(target{prefix, "observed"}),
	}
	for name := range tables {
		s.upserts[name] = upsertRow.For(target{prefix, name})
	}
	return s
}

// observationsKept is how many observations are kept for each workspace.
const observationsKept = 8

// sessionsKept is how many sessions are kept for each node.
const sessionsKept = 8

// columnsOf returns all columns of a table in the order of a row's values.
func columnsOf(t table) []string {
	columns := slices.Clone(t.key)
	if !t.immutable {
		columns = append(columns, "version")
	}
	return append(append(columns, t.columns...), "body")
}

// typesOf has the SQL types of the columns that are not text, by name; columns of ids are uuids.
var typesOf = map[string]string{
	"version": "bigint", "generation": "bigint", "n": "integer", "step": "integer", "attempt": "integer",
	"serving": "boolean", "live": "boolean", "stalled": "boolean", "released": "boolean", "orphaned": "boolean",
	"open": "boolean", "engaged": "boolean", "since": "timestamptz", "expires_at": "timestamptz",
	"detected_at": "timestamptz", "body": "jsonb",
}

// upsertSQL returns the statement that writes rows of different keys; each argument is the array of one column's
// values. A row that already has the same version or a later one stays.
func upsertSQL(t table, name string) string {
	columns := columnsOf(t)
	arrays := make([]string, len(columns))
	for i, c := range columns {
		kind, ok := typesOf[c]
		switch {
		case ok:
		case strings.HasSuffix(c, "_id"):
			kind = "uuid"
		default:
			kind = "text"
		}
		arrays[i] = fmt.Sprintf("$%d::%s[]", i+1, kind)
	}
	sql := fmt.Sprintf("INSERT INTO %s AS t (%s) SELECT * FROM unnest(%s) ON CONFLICT (%s) DO ",
		name, strings.Join(columns, ", "), strings.Join(arrays, ", "), strings.Join(t.key, ", "))
	if t.immutable {
		return sql + "NOTHING"
	}
	sets := []string{"version = EXCLUDED.version", "body = EXCLUDED.body"}
	for _, c := range t.columns {
		value, ok := t.set[c]
		if !ok {
			value = "EXCLUDED." + c
		}
		sets = append(sets, c+" = "+value)
	}
	sql += "UPDATE SET " + strings.Join(sets, ", ") + " WHERE t.version <= EXCLUDED.version"
	if t.returning != "" {
		sql += " RETURNING " + t.returning
	}
	return sql
}
