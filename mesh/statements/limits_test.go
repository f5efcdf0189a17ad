package statements_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
)

// limits are the bounds of statements that return more than one row. Of a subquery with LIMIT 1 any row will do.
var limits = regexp.MustCompile(`\bLIMIT (\$\d+|[0-9]{2,}|[2-9])`)

// unordered are the statements in which a bound may leave out any rows, with the reason.
var unordered = map[string]string{
	"saga.find_stalls":                  "what it finds is flagged, and not found again",
	"workspace.bare_operation_keys":     "what it finds is written, and not found again",
	"gateway.sweep_sessions":            "what it finds is taken away",
	"gateway.sweep_people":              "what it finds is taken away",
	"identity.read_nodes_that_need_key": "any of them keep a key",
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
		if depth < 0 {
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

// TestABoundHasAnOrder: a statement that returns some rows of many says which, or the same are left out again and again.
func TestABoundHasAnOrder(t *testing.T) {
	found := map[string]bool{}
	for _, s := range pg.Statements() {
		sql := s.SQL()
		for _, at := range limits.FindAllStringIndex(sql, -1) {
			if strings.Contains(selectOf(sql, at[0]), "ORDER BY") {
				continue
			}
			found[s.Name()] = true
			if unordered[s.Name()] == "" {
				t.Errorf("%s has a LIMIT without an ORDER BY: %s", s.Name(), sql[at[0]:at[1]])
			}
		}
	}
	for name := range unordered {
		if !found[name] {
			t.Errorf("%s has no LIMIT without an ORDER BY, and is named as one that has", name)
		}
	}
}
