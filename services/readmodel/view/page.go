package view

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
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

// placed is a row of a list.
type placed interface{ at() place }

// pageOf returns the rows of one page, read with all, and the token of the next page.
func pageOf[R placed](
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
