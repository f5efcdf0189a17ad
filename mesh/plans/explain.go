package plans

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/pg"
)

// Cost is the cost of one call of a statement.
type Cost struct {
	Rows     int64 // read from tables and thrown away by joins
	Returned int64 // or changed
	Buffers  int64
	Took     time.Duration // the execution alone
	Plan     string
}

// node is one of a plan in JSON.
type node struct {
	Type          string  `json:"Node Type"`
	Relation      string  `json:"Relation Name"`
	Operation     string  `json:"Operation"`
	Rows          float64 `json:"Actual Rows"`
	Loops         float64 `json:"Actual Loops"`
	ByFilter      float64 `json:"Rows Removed by Filter"`
	ByJoin        float64 `json:"Rows Removed by Join Filter"`
	ByRecheck     float64 `json:"Rows Removed by Index Recheck"`
	SharedHit     int64   `json:"Shared Hit Blocks"`
	SharedRead    int64   `json:"Shared Read Blocks"`
	Children      []node  `json:"Plans"`
	Parent        string  `json:"Parent Relationship"`
	ConflictsWith float64 `json:"Conflicting Tuples"`
}

// read returns how many rows a plan reads: those that come from tables, and those that conditions threw away on
// the way.
func (n *node) read() float64 {
	rows := n.ByFilter + n.ByJoin + n.ByRecheck
	if n.Relation != "" && n.Type != "ModifyTable" {
		rows += n.Rows
	}
	rows *= n.Loops
	for i := range n.Children {
		rows += n.Children[i].read()
	}
	return rows
}

// returned returns how many rows a statement returned, or changed where it returns none.
func (n *node) returned() float64 {
	if n.Type == "ModifyTable" && n.Rows == 0 {
		most := 0.0
		for i := range n.Children {
			most = max(most, n.Children[i].Rows*n.Children[i].Loops)
		}
		return most
	}
	return n.Rows
}

// errRollback ends a transaction whose changes must not stay.
var errRollback = errors.New("nothing of this is kept")

// ErrNoPlan is the error of Explain for a command that has no plan, such as LISTEN.
var ErrNoPlan = errors.New("the command has no plan")

// planned matches the statements that have a plan, behind the comment with their name.
var planned = regexp.MustCompile(`(?is)^/\*[^*]*\*/\s*(select|insert|update|delete|with|merge)\b`)

// Explain runs a statement with arguments that are SQL literals, as the role of the pool, and rolls back its changes.
func Explain(ctx context.Context, pool *pgxpool.Pool, s *pg.Statement, literals []string) (Cost, error) {
	var cost Cost
	if !planned.MatchString(s.SQL()) {
		return cost, ErrNoPlan
	}
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		conn := tx.Conn().PgConn()
		const settings = "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL statement_timeout = '60s'; SET LOCAL " +
			"lock_timeout = '5s'"
		if _, err := conn.Exec(ctx, settings).ReadAll(); err != nil {
			return fmt.Errorf("set up the session: %w", err)
		}
		if _, err := conn.Exec(ctx, "PREPARE explained AS "+s.SQL()).ReadAll(); err != nil {
			return fmt.Errorf("prepare: %w", err)
		}
		defer func() {
			// A statement that was prepared outlives its transaction.
			_, undo := conn.Exec(ctx, "ROLLBACK; DEALLOCATE explained").ReadAll()
			err = errors.Join(err, undo)
		}()
		call := "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE explained"
		if len(literals) > 0 {
			call += "(" + strings.Join(literals, ", ") + ")"
		}
		results, err := conn.Exec(ctx, call).ReadAll()
		if err != nil {
			return fmt.Errorf("run: %w", err)
		}
		raw := results[0].Rows[0][0]
		var plans []struct {
			Plan node    `json:"Plan"`
			Took float64 `json:"Execution Time"`
		}
		if err := json.Unmarshal(raw, &plans); err != nil || len(plans) != 1 {
			return fmt.Errorf("read the plan: %w", err)
		}
		p := plans[0].Plan
		cost = Cost{
			Rows: int64(p.read()), Returned: int64(p.returned()), Buffers: p.SharedHit + p.SharedRead,
			Took: time.Duration(plans[0].Took * float64(time.Millisecond)), Plan: string(raw),
		}
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		return Cost{}, fmt.Errorf("explain %s: %w", s.Name(), err)
	}
	return cost, nil
}

// Arguments finds arguments for statements in the rows of a fleet.
type Arguments struct {
	conn    *pgx.Conn // as the administrator
	tables  map[string][]string
	samples map[string]map[string]*string
}

// NewArguments reads which tables there are.
func NewArguments(ctx context.Context, conn *pgx.Conn) (*Arguments, error) {
	columns, err := pg.All[column](ctx, conn, columnsOfTables)
	if err != nil {
		return nil, fmt.Errorf("read the tables of the fleet: %w", err)
	}
	a := &Arguments{conn: conn, tables: map[string][]string{}, samples: map[string]map[string]*string{}}
	for _, c := range columns {
		a.tables[c.Table] = append(a.tables[c.Table], c.Column)
	}
	return a, nil
}

// sample returns a row from the middle of a table, as text by its columns.
func (a *Arguments) sample(ctx context.Context, table string) (map[string]*string, error) {
	if row, ok := a.samples[table]; ok {
		return row, nil
	}
	columns := a.tables[table]
	sql := "SELECT " + strings.Join(columns, "::text, ") + "::text FROM " + table + " OFFSET (SELECT count(*) / 2 FROM " +
		table + ") LIMIT 1"
	results, err := a.conn.PgConn().Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("read a row of %s: %w", table, err)
	}
	row := map[string]*string{}
	for _, values := range results[0].Rows {
		for i, v := range values {
			if v != nil {
				text := string(v)
				row[columns[i]] = &text
			}
		}
	}
	a.samples[table] = row
	return row, nil
}

// page returns the bounds of PageSize ids from the middle of a column: the one before them, and the last.
func (a *Arguments) page(ctx context.Context, table, column string) (*string, *string, error) {
	row, err := a.sample(ctx, table)
	if err != nil || row[column] == nil {
		return nil, nil, err
	}
	from := "FROM (SELECT DISTINCT " + column + " AS id FROM " + table + " WHERE " + column + " >= '" + *row[column] +
		"') x"
	sql := "SELECT min(x.id::text), max(x.id::text) FROM (SELECT x.id " + from + " ORDER BY x.id LIMIT " +
		strconv.Itoa(PageSize+1) + ") x"
	results, err := a.conn.PgConn().Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, nil, fmt.Errorf("read a page of %s: %w", table, err)
	}
	first, last := string(results[0].Rows[0][0]), string(results[0].Rows[0][1])
	return &first, &last, nil
}

var (
	fromTables = regexp.MustCompile(
		`(?i)\b((?:lifecycle|recovery|readmodel|nodeapi|events|mesh)\.[a-z_]+)(?:\s+(?:AS\s+)?([a-z]{1,8})\b)?`,
	)
	comparison = regexp.MustCompile(
		`(?:\b([a-z]{1,8})\.)?\b([a-z_]+)(?:::[a-z]+)?\s*(?:=|<>|<=|>=|<|>)\s*(?:ANY\s*)?\(?\s*\$(\d+)\b`,
	)
	// A page of a sweep: above one id and up to another.
	pages   = regexp.MustCompile(`\b([a-z]{1,8})\.([a-z_]+) > \$(\d+)::uuid AND [a-z]{1,8}\.[a-z_]+ <= \$(\d+)::uuid`)
	limits  = regexp.MustCompile(`LIMIT \$(\d+)`)
	offsets = regexp.MustCompile(`OFFSET \$(\d+)`)
	// A statement for all tenants takes NULL as its argument.
	ofAll = regexp.MustCompile(`(?:WHERE|AND) \$(\d+)::text IS NULL\b`)
)

// For returns SQL literals for the parameters of a statement: a parameter that is compared with a column has the
// value of a row of that table.
func (a *Arguments) For(ctx context.Context, conn *pgx.Conn, s *pg.Statement) ([]string, error) {
	prepared, err := conn.Prepare(ctx, "", s.SQL())
	if err != nil {
		return nil, fmt.Errorf("prepare %s: %w", s.Name(), err)
	}
	tables := map[string]string{} // by alias
	var mentioned []string
	for _, m := range fromTables.FindAllStringSubmatch(s.SQL(), -1) {
		if _, ok := a.tables[m[1]]; ok {
			tables[m[2]] = m[1]
			mentioned = append(mentioned, m[1])
		}
	}
	values := map[string]*string{}
	if m := pages.FindStringSubmatch(s.SQL()); m != nil && tables[m[1]] != "" {
		if values[m[3]], values[m[4]], err = a.page(ctx, tables[m[1]], m[2]); err != nil {
			return nil, err
		}
	}
	for _, m := range comparison.FindAllStringSubmatch(s.SQL(), -1) {
		if values[m[3]] != nil {
			continue
		}
		if table, ok := tables[m[1]]; ok && m[1] != "" && slices.Contains(a.tables[table], m[2]) {
			mentioned = slices.Insert(mentioned, 0, table)
		}
		for _, table := range mentioned {
			if !slices.Contains(a.tables[table], m[2]) {
				continue
			}
			row, err := a.sample(ctx, table)
			if err != nil {
				return nil, err
			}
			if values[m[3]] = row[m[2]]; values[m[3]] != nil {
				break
			}
		}
	}
	most, none := map[string]bool{}, map[string]bool{}
	for _, m := range limits.FindAllStringSubmatch(s.SQL(), -1) {
		most[m[1]] = true
	}
	for _, m := range offsets.FindAllStringSubmatch(s.SQL(), -1) {
		last := strconv.Itoa(PageSize - 1)
		values[m[1]] = &last
	}
	for _, m := range ofAll.FindAllStringSubmatch(s.SQL(), -1) {
		none[m[1]] = true
	}
	out := make([]string, 0, len(prepared.ParamOIDs))
	for i, oid := range prepared.ParamOIDs {
		n := fmt.Sprint(i + 1)
		typ, ok := conn.TypeMap().TypeForOID(oid)
		name := ""
		if ok {
			name = typ.Name
		}
		switch {
		case most[n]:
			out = append(out, "500")
		case none[n] && values[n] == nil:
			out = append(out, "NULL")
		default:
			out = append(out, literal(name, values[n]))
		}
	}
	return out, nil
}

// literal returns a value of a type as SQL; without a value, a usual one of the type.
func literal(typ string, value *string) string {
	quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	element, array := strings.CutPrefix(typ, "_")
	if value == nil {
		usual := map[string]string{
			"bool": "false", "int2": "1", "int4": "1", "int8": "1", "float8": "15", "numeric": "1", "interval": "'15 s'",
			"timestamptz": "mesh.clock()", "jsonb": "'{}'", "json": "'{}'", "text": "''", "bytea": `'\x00'`, "xid8": "'1'",
			"uuid": "'00000000-0000-7000-8000-000000000001'",
		}
		one, ok := usual[element]
		switch {
		case array && ok:
			return "ARRAY[" + one + "]::" + element + "[]"
		case ok:
			return one
		}
		return "NULL"
	}
	if array && !strings.HasPrefix(*value, "{") {
		return "ARRAY[" + quote(*value) + "]::" + element + "[]"
	}
	return quote(*value)
}
