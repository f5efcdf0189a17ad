package plans

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// level is the kind of object that a row or an id belongs to: a finer one has a higher number.
type level int

const (
	ofMesh level = iota
	ofTenant
	ofNode
	ofWorkspace
	ofEnded // a workspace that was recreated and decommissioned
)

// Template holds the rows that the product wrote for one tenant, one machine and one workspace, and for one that has
// ended if the source says so.
type Template struct {
	tables []table
	levels map[string]level // of each id and name that copies replace
	// Of instances: each workspace has a machine of its own, whose rows and ids belong to the workspace.
	instances bool
	launches  launches

	marked sync.Once
	cuts   []mark // where rows are cut; made at the first cut
}

// table has the rows of one table in the format of COPY.
type table struct {
	name    string   // qualified and quoted
	columns []string // quoted
	types   []string // of the columns
	rows    []string
}

type column struct {
	Table  string `db:"table_name"`
	Column string `db:"column_name"`
	Type   string `db:"column_type"`
}

// columnsOfTables lists the columns of the tables that are copied. Tables that are for the whole mesh, or are derived
// from the log by numbers that copies cannot have, are taken as they are.
var columnsOfTables = pg.Define(pg.RoleOwner, "plans.columns_of_tables", `
	SELECT format('%I.%I', n.nspname, c.relname) AS table_name, quote_ident(a.attname) AS column_name,
		format_type(a.atttypid, NULL) AS column_type
	FROM pg_class c
	JOIN pg_namespace n ON n.oid = c.relnamespace
	JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
	WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition
		AND n.nspname IN ('lifecycle', 'recovery', 'readmodel', 'nodeapi', 'events', 'mesh')
		AND c.relname NOT LIKE 'river\_%' AND c.relname NOT LIKE 'scratch\_%'
			AND c.relname NOT IN ('goose_db_version', 'clock_offset')
	ORDER BY 1, a.attnum`)

var uuids = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)

// serials are the numbers of certificates, which are unique as ids are. They are written without leading zeros.
var serials = regexp.MustCompile(`^[0-9a-f]{24,32}$`)

// capture reads all rows and finds the level of each id and name.
func capture(ctx context.Context, conn *pgx.Conn, instances bool) (*Template, error) {
	columns, err := pg.All[column](ctx, conn, columnsOfTables)
	if err != nil {
		return nil, fmt.Errorf("read the tables of the template: %w", err)
	}
	tmpl := &Template{instances: instances, levels: map[string]level{
		tenantName: ofTenant, nodeName: ofNode, workspaceName: ofWorkspace, endedName: ofEnded,
	}}
	for len(columns) > 0 {
		n := slices.IndexFunc(columns, func(c column) bool { return c.Table != columns[0].Table })
		if n < 0 {
			n = len(columns)
		}
		t := table{name: columns[0].Table}
		for _, c := range columns[:n] {
			t.columns, t.types = append(t.columns, c.Column), append(t.types, c.Type)
		}
		columns = columns[n:]
		var out bytes.Buffer
		list := strings.Join(t.columns, ", ")
		if _, err := conn.PgConn().CopyTo(ctx, &out, "COPY (SELECT "+list+" FROM "+t.name+") TO STDOUT"); err != nil {
			return nil, fmt.Errorf("read %s: %w", t.name, err)
		}
		t.rows = slices.Collect(strings.Lines(out.String()))
		tmpl.tables = append(tmpl.tables, t)
	}
	return tmpl, tmpl.classify()
}

// shared are the columns whose ids belong to the mesh, and ofMachine those whose ids belong to the machine
// wherever they stand.
var (
	shared    = []string{"replica_id", "person_id", "session_key"}
	ofMachine = []string{
		"node_id", "node_instance_id", "session_id", "ledger_id", "confirmed_session_id", "enrollment_id",
		"token_id",
	}
)

// idsOf returns the ids in a row, also those in binary messages.
func idsOf(row string) []string {
	found := uuids.FindAllString(row, -1)
	for field := range strings.SplitSeq(strings.TrimSuffix(row, "\n"), "\t") {
		if raw, ok := strings.CutPrefix(field, `\\x`); ok {
			if data, err := hex.DecodeString(raw); err == nil {
				found = append(found, uuids.FindAllString(string(data), -1)...)
			}
		}
	}
	return found
}

// classify gives each id its level: the ids of certain columns first, then all other ids in the rows of the workspace,
// of the machine, of the tenant.
func (t *Template) classify() error {
	general := map[string]bool{}
	for _, tab := range t.tables {
		for _, row := range tab.rows {
			for i, field := range strings.Split(strings.TrimSuffix(row, "\n"), "\t") {
				name := tab.columns[i]
				switch {
				case field == `\N` || field == "":
				case slices.Contains(shared, name), t.instances && name == "boot_id":
					// All instances of the template ran on one host.
					general[field] = true
				case name == "tenant_id" && uuids.MatchString(field), tab.name == "lifecycle.tenant" && name == "id":
					t.levels[field] = ofTenant
				case t.instances:
				case name == "serial" && serials.MatchString(field), name == "csr_key_sha256":
					t.levels[field] = ofNode
				case slices.Contains(ofMachine, name) && uuids.MatchString(field) && tab.name != "readmodel.person_session":
					t.levels[field] = ofNode
				}
			}
		}
	}
	for id := range general {
		delete(t.levels, id)
	}
	for _, at := range []level{ofWorkspace, ofEnded, ofNode, ofTenant} {
		for again := true; again; {
			again = false
			for _, tab := range t.tables {
				for _, row := range tab.rows {
					if !copied(tab.name) || t.levelOf(row) != at {
						continue
					}
					for _, id := range idsOf(row) {
						if _, known := t.levels[id]; !known && !general[id] {
							t.levels[id], again = at, true
						}
					}
				}
			}
		}
	}
	needed := []level{ofTenant, ofNode, ofWorkspace}
	if t.instances {
		t.classifySerials()
		needed = []level{ofTenant, ofWorkspace}
	}
	for _, need := range needed {
		if n := len(t.tokens(need)); n < 2 {
			return errors.New("the template has no rows of its tenant, its machine or its workspace")
		}
	}
	return nil
}

// classifySerials gives the numbers and keys of certificates the levels of their rows.
func (t *Template) classifySerials() {
	for _, tab := range t.tables {
		for _, row := range tab.rows {
			at := t.levelOf(row)
			if !copied(tab.name) || at < ofNode {
				continue
			}
			for i, field := range strings.Split(strings.TrimSuffix(row, "\n"), "\t") {
				if name := tab.columns[i]; name == "serial" && serials.MatchString(field) || name == "csr_key_sha256" &&
					field != `\N` {
					t.levels[field] = at
				}
			}
		}
	}
}

// levelOf returns the finest level of the tokens in a row.
func (t *Template) levelOf(row string) level {
	at := ofMesh
	for _, id := range idsOf(row) {
		at = max(at, t.levels[id])
	}
	for _, name := range []string{tenantName, nodeName, workspaceName, endedName} {
		if strings.Contains(row, name) || strings.Contains(row, hex.EncodeToString([]byte(name))) {
			at = max(at, t.levels[name])
		}
	}
	return at
}

// copied reports whether the rows of a table are copied: those of the audit log are a chain, and those of the
// sequencer are made anew.
func copied(table string) bool {
	return !slices.Contains([]string{
		"readmodel.audit", "readmodel.audit_head", "events.numbered", "readmodel.person",
		"readmodel.person_session",
	}, table)
}

// tokens returns the tokens of a level, the longest first.
func (t *Template) tokens(at level) []string {
	var out []string
	for token, l := range t.levels {
		if l == at {
			out = append(out, token)
		}
	}
	slices.SortFunc(out, func(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), cmp.Compare(a, b)) })
	return out
}
