package view

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// condition narrows a list. Each ? in it is an argument.
type condition string

// layout is what a list reads, in keyset order: by sort, then id; or by id alone, newest first, if sort is empty.
type layout struct {
	name       string
	with       string // text before SELECT; empty: none
	columns    string // columns that are read in addition to sort and id
	from       string
	sort       string      // expression of text
	id         string      // column of uuid
	lead       int         // how many arguments precede those of the conditions
	tenant     string      // column of the tenant, which the last of these arguments is compared with; empty: none
	conditions []condition // those that a request may add
}

// parts select the conditions of one statement of a list.
type parts struct {
	conditions []condition
	after      bool // it continues after a place in the order
	scoped     bool // it reads one tenant's rows
}

// samples returns parts that together have every condition, for the tests that prepare the statements.
func (l *layout) samples() []parts {
	return []parts{
		{},
		{conditions: l.conditions, after: true},
		{scoped: true},
		{conditions: l.conditions, after: true, scoped: true},
	}
}

// compose returns the statement for the parts.
func (l *layout) compose(p parts) string {
	sortExpr, order := l.sort, l.sort+", "+l.id
	next := condition("(" + l.sort + ", " + l.id + ") > (?::text, ?::uuid)")
	if l.sort == "" {
		sortExpr, order, next = "''", l.id+" DESC", condition(l.id+" < ?::uuid")
	}
	conditions := slices.Clone(p.conditions)
	if p.after {
		conditions = append(conditions, next)
	}
	where, n := filter(l.name, tenancy{l.tenant, p.scoped}, l.lead, conditions, append(slices.Clone(l.conditions), next))
	with := ""
	if l.with != "" {
		with = "WITH " + l.with + " "
	}
	return with + "SELECT " + sortExpr + " AS page_sort, " + l.id + "::text AS page_id, " + l.columns +
		" FROM " + l.from + where +
		" ORDER BY " + order + " LIMIT $" + strconv.Itoa(n+1)
}

// tenancy is the tenant's part of a statement. A comparison with a tenant that may be NULL cannot use an index in a
// generic plan, so the statement for one tenant has another text than the one for all tenants.
type tenancy struct {
	column string
	one    bool
}

// condition returns the SQL condition that compares the column with the n-th argument.
func (of tenancy) condition(n int) string {
	if of.one {
		return of.column + " = $" + strconv.Itoa(n)
	}
	return "$" + strconv.Itoa(n) + "::text IS NULL"
}

// filter returns the WHERE clause of a list with the tenant, which is the last of its first n arguments, and further
// conditions; and how many arguments there are then. It panics for a condition that the list does not have, because no
// sample would cover it.
func filter(list string, of tenancy, n int, conditions, known []condition) (string, int) {
	var where []string
	if of.column != "" {
		where = append(where, of.condition(n))
	}
	for _, c := range conditions {
		if !slices.Contains(known, c) {
			//nolint:forbidigo // a mistake of this program, in a constant
			panic(fmt.Sprintf("list %s: no condition %q", list, c))
		}
		text := string(c)
		for strings.Contains(text, "?") {
			n++
			text = strings.Replace(text, "?", "$"+strconv.Itoa(n), 1)
		}
		where = append(where, text)
	}
	if len(where) == 0 {
		return "", n
	}
	return " WHERE " + strings.Join(where, " AND "), n
}
