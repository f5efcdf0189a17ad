package statements_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// bounds matches the bounds of a result, by any expression. Of one row any will do.
var (
	bounds = regexp.MustCompile(`(?i)\bLIMIT\s+\S+|\bFETCH\s+(?:FIRST|NEXT)\b`)
	ofOne  = regexp.MustCompile(`(?i)^LIMIT\s+1\b`)
	// ofNone is no bound: a limit of connections of a role, and a comment.
	ofNone = regexp.MustCompile(`(?i)\bCONNECTION\s+LIMIT\s+\S+|--[^\n]*`)
)

// boundWithoutOrder returns the bounds of a text that may leave out any rows.
func boundWithoutOrder(sql string) []string {
	sql = ofNone.ReplaceAllString(sql, "")
	var out []string
	for _, at := range bounds.FindAllStringIndex(sql, -1) {
		bound := sql[at[0]:at[1]]
		if !ofOne.MatchString(bound) && !strings.Contains(strings.ToUpper(selectOf(sql, at[0])), "ORDER BY") {
			out = append(out, bound)
		}
	}
	return out
}

// unordered are the statements in which a bound may leave out any rows, with the reason.
var unordered = map[string]string{
	"stall.find":                        "what it finds is flagged, and not found again",
	"spec.bare_operation_keys":          "what it finds is written, and not found again",
	"people.sweep_sessions":             "what it finds is taken away",
	"people.sweep_people":               "what it finds is taken away",
	"identity.read_nodes_that_need_key": "any of them keep a key",
	"wave.read_state":                   "it counts them, and no further than is needed",
	"fleet.count_expected_nodes":        "as above",
	"gate.count_nodes":                  "as above",
}

// selectOf returns the text of the query that a bound at a place of it belongs to, without its subqueries.
func selectOf(sql string, at int) string {
	var out []byte
	depth := 0
	for i := at - 1; i >= 0; i-- {
		switch sql[i] {
		case ')':
			depth++
		case '(':
			depth--
		}
		if depth < 0 || depth == 0 && sql[i] == ';' {
			break
		}
		if depth == 0 {
			out = append(out, sql[i])
		}
	}
	for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
		out[i], out[j] = out[j], out[i]
	}
	return string(out)
}

// TestABoundHasAnOrder: a statement or a function that takes some rows of many has an order, or the same rows are left
// out again and again.
func TestABoundHasAnOrder(t *testing.T) {
	texts := map[string]string{}
	for i, s := range pg.Statements() {
		texts[fmt.Sprintf("%s#%d", s.Name(), i)] = s.SQL()
	}
	for name, body := range functions(t) {
		texts["function "+name+"#"] = body
	}
	found, bounded := map[string]bool{}, map[string]bool{}
	for key, sql := range texts {
		name, _, _ := strings.Cut(key, "#")
		bounded[name] = bounded[name] || bounds.MatchString(sql)
		for _, bound := range boundWithoutOrder(sql) {
			found[name] = true
			if unordered[name] == "" {
				t.Errorf("%s has a bound without an ORDER BY: %s", name, bound)
			}
		}
	}
	for _, name := range []string{
		"function mesh_ca.cut_ended_certificates",
		"function lifecycle.cut_tasks(interval,uuid,integer)",
	} {
		if !bounded[name] {
			t.Errorf("no bound of %s was read", name)
		}
	}
	for name := range unordered {
		if !found[name] {
			t.Errorf("%s has no bound without an ORDER BY, and is named as one that has", name)
		}
	}
}

// functions returns the bodies of the functions that the migrations have made, and of those that are made in the
// authority's database.
func functions(t *testing.T) map[string]string {
	t.Helper()
	ctx, out := testkit.Context(t), map[string]string{}
	rows, err := testkit.DB(t).OwnerPool().Query(ctx, `SELECT p.oid::regprocedure::text, p.prosrc FROM pg_proc p
		JOIN pg_namespace n ON n.oid = p.pronamespace
			WHERE n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'public')`)
	if err != nil {
		t.Fatal(err)
	}
	var name, body string
	if _, err := pgx.ForEachRow(rows, []any{&name, &body}, func() error { out[name] = body; return nil }); err != nil {
		t.Fatal(err)
	}
	ofAuthority, err := os.ReadFile(filepath.FromSlash("../../services/recovery/castore/functions.sql"))
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range strings.Split(string(ofAuthority), "CREATE OR REPLACE FUNCTION ")[1:] {
		name, _, _ := strings.Cut(body, "(")
		out[name] = body
	}
	return out
}

// TestABoundIsFound: however it is written, in a subquery of a query that has an order too.
func TestABoundIsFound(t *testing.T) {
	for _, sql := range []string{
		"SELECT 1 FROM t LIMIT $1", "SELECT 1 FROM t LIMIT 10", "SELECT 1 FROM t LIMIT most",
		"SELECT 1 FROM t LIMIT ceil($1 / 2)", "SELECT 1 FROM t limit\n a.most", "SELECT 1 FROM t FETCH FIRST 10 ROWS ONLY",
		"SELECT 1 FROM t FETCH NEXT $1 ROWS ONLY", "SELECT 1 FROM (SELECT 1 FROM t LIMIT $1) x ORDER BY 1",
		"SELECT 1 FROM t -- ORDER BY\nLIMIT 5",
		"SELECT 1 FROM t ORDER BY 1; SELECT 1 FROM t LIMIT most",
	} {
		if len(boundWithoutOrder(sql)) != 1 {
			t.Errorf("no bound was found in %q", sql)
		}
	}
	for _, sql := range []string{
		"SELECT 1 FROM t LIMIT 1", "SELECT 1 FROM t LIMIT 1)", "SELECT 1 FROM t ORDER BY 1 LIMIT most",
		"ALTER ROLE r CONNECTION LIMIT 20", "SELECT 1 FROM t order by 1 FETCH FIRST 10 ROWS ONLY",
		"SELECT 1 FROM t -- LIMIT 5", "SELECT retry_limit FROM t",
	} {
		if found := boundWithoutOrder(sql); len(found) > 0 {
			t.Errorf("%q was found in %q", found, sql)
		}
	}
}
