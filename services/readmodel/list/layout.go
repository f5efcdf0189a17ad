package list

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Condition narrows a list. Each ? in it is an argument.
type Condition string

// Layout is what a list reads, in keyset order: by sort, then id; or by id alone, newest first, if sort is empty.
type Layout struct {
	Name       string
	With       string // text before SELECT; empty: none
	Columns    string // columns that are read in addition to sort and id
	From       string
	Sort       string      // expression of text
	ID         string      // column of uuid
	Lead       int         // how many arguments precede those of the conditions
	Tenant     string      // column of the tenant, which the last of these arguments is compared with; empty: none
	Conditions []Condition // those that a request may add
}

// Parts select the conditions of one statement of a list.
type Parts struct {
	Conditions []Condition
	after      bool // it continues after a place in the order
	Scoped     bool // it reads one tenant's rows
}

// Samples returns parts that together have every condition, for the tests that prepare the statements.
func (l *Layout) Samples() []Parts {
	return []Parts{
		{},
		{Conditions: l.Conditions, after: true},
		{Scoped: true},
		{Conditions: l.Conditions, after: true, Scoped: true},
	}
}

// Compose returns the statement for the parts.
func (l *Layout) Compose(p Parts) string {
	sortExpr, order := l.Sort, l.Sort+", "+l.ID
	next := Condition("(" + l.Sort + ", " + l.ID + ") > (?::text, ?::uuid)")
	if l.Sort == "" {
		sortExpr, order, next = "''", l.ID+" DESC", Condition(l.ID+" < ?::uuid")
	}
	conditions := slices.Clone(p.Conditions)
	if p.after {
		conditions = append(conditions, next)
	}
	where, n := Where(l.Name, Tenancy{Column: l.Tenant, One: p.Scoped}, l.Lead, conditions,
		append(slices.Clone(l.Conditions), next))
	with := ""
	if l.With != "" {
		with = "WITH " + l.With + " "
	}
	return with + "SELECT " + sortExpr + " AS page_sort, " + l.ID + "::text AS page_id, " + l.Columns +
		" FROM " + l.From + where +
		" ORDER BY " + order + " LIMIT $" + strconv.Itoa(n+1)
}

// Tenancy is the tenant's part of a statement. A comparison with a tenant that may be NULL cannot use an index in a
// generic plan, so the statement for one tenant has another text than the one for all tenants.
type Tenancy struct {
	Column string
	One    bool // the statement is for one tenant
}

// condition returns the SQL condition that compares the column with the n-th argument.
func (of Tenancy) condition(n int) string {
	if of.One {
		return of.Column + " = $" + strconv.Itoa(n)
	}
	return "$" + strconv.Itoa(n) + "::text IS NULL"
}

// Where returns the WHERE clause of a list with the tenant, which is the last of its first n arguments, and further
// conditions; and how many arguments there are then. It panics for a condition that the list does not have, because no
// sample would cover it.
func Where(list string, of Tenancy, n int, conditions, known []Condition) (string, int) {
	var where []string
	if of.Column != "" {
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
