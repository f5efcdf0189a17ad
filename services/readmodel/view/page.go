package view

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// Page selects a part of a list.
type Page struct {
	Size  int32
	Token string
}

func (p Page) limit() int {
	switch {
	case p.Size <= 0:
		return defaultPage
	case p.Size > maxPage:
		return maxPage
	default:
		return int(p.Size)
	}
}

// cursor is the place at which a page ended. It grants no rights: the caller who presents it is scoped again.
type cursor struct {
	List string `json:"l"`
	Sort string `json:"s,omitempty"`
	ID   string `json:"i"`
}

func (c cursor) encode() string {
	raw, err := json.Marshal(c)
	if err != nil {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

func decodeCursor(list, token string) (cursor, error) {
	var c cursor
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil || c.List != list || !isUUID(c.ID) || strings.ContainsRune(c.Sort, 0) {
		return cursor{}, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
			fault.Unmet("page_token: not from this list"), fault.Cause(err))
	}
	return c, nil
}

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
	where, n := filter(l.name, scope{l.tenant, p.scoped}, l.lead, conditions, append(slices.Clone(l.conditions), next))
	with := ""
	if l.with != "" {
		with = "WITH " + l.with + " "
	}
	return with + "SELECT " + sortExpr + " AS page_sort, " + l.id + "::text AS page_id, " + l.columns +
		" FROM " + l.from + where +
		" ORDER BY " + order + " LIMIT $" + strconv.Itoa(n+1)
}

// scope is the tenant's part of a statement. A comparison with a tenant that may be NULL cannot use an index in a
// generic plan, so the statement for one tenant has another text than the one for all tenants.
type scope struct {
	column string
	one    bool
}

// condition returns the SQL condition that compares the column with the n-th argument.
func (s scope) condition(n int) string {
	if s.one {
		return s.column + " = $" + strconv.Itoa(n)
	}
	return "$" + strconv.Itoa(n) + "::text IS NULL"
}

// filter returns the WHERE clause of a list with the tenant, which is the last of its first n arguments, and further
// conditions; and how many arguments there are then. It panics for a condition that the list does not have, because no
// sample would cover it.
func filter(list string, of scope, n int, conditions, known []condition) (string, int) {
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

// listing is one request for a list.
type listing struct {
	layout    *layout
	statement *pg.Dynamic[parts]
	where     []condition
	args      []any
}

// and adds a condition with its arguments.
func (l *listing) and(c condition, args ...any) {
	l.where, l.args = append(l.where, c), append(l.args, args...)
}

// place is the position of a row in the order of its list. Every row of a list embeds it.
type place struct {
	Sort string `db:"page_sort"`
	ID   string `db:"page_id"`
}

func (p place) at() place { return p }

// run returns one page of a list and the token of the next page.
func run[R interface{ at() place }, T any](ctx context.Context, s *Snapshot, l listing, page Page,
	read func(R) (T, error),
) ([]T, string, error) {
	rows, next, err := pageOf(l, s.scope, page, func(statement *pg.Statement, args ...any) ([]R, error) {
		return rowsOf[R](ctx, s, statement, args...)
	})
	if err != nil {
		return nil, "", err
	}
	var items []T
	for _, row := range rows {
		item, err := read(row)
		if err != nil {
			return nil, "", fmt.Errorf("list %s: %w", l.layout.name, err)
		}
		items = append(items, item)
	}
	return items, next, nil
}

// pageOf returns the rows of one page, read with all, and the token of the next page.
func pageOf[R interface{ at() place }](
	l listing, in Scope, page Page, all func(*pg.Statement, ...any) ([]R, error),
) ([]R, string, error) {
	if page.Token != "" {
		c, err := decodeCursor(l.layout.name, page.Token)
		if err != nil {
			return nil, "", err
		}
		if l.layout.sort != "" {
			l.args = append(l.args, c.Sort)
		}
		l.args = append(l.args, c.ID)
	}
	limit := page.limit()
	statement := l.statement.For(parts{conditions: l.where, after: page.Token != "", scoped: !in.all})
	rows, err := all(statement, append(l.args, limit+1)...)
	if err != nil {
		return nil, "", fmt.Errorf("list %s: %w", l.layout.name, err)
	}
	next := ""
	if len(rows) > limit {
		rows = rows[:limit]
		last := rows[limit-1].at()
		next = cursor{List: l.layout.name, Sort: last.Sort, ID: last.ID}.encode()
	}
	return rows, next, nil
}
