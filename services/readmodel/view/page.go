package view

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// Page is which part of a list is wanted.
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

// cursor is where a page ended. It names a place in an order and grants nothing: whoever shows it is scoped anew.
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

// listing is a list in keyset order: by sort, then id; or by id alone, newest first, if sort is empty.
type listing struct {
	name    string
	columns string // what scan reads, after sort and id
	from    string
	sort    string // expression of text
	id      string // column of uuid
	where   []string
	args    []any
}

// and adds a condition; each ? in it is one of args.
func (l *listing) and(condition string, args ...any) {
	for _, a := range args {
		l.args = append(l.args, a)
		condition = strings.Replace(condition, "?", fmt.Sprintf("$%d", len(l.args)), 1)
	}
	l.where = append(l.where, condition)
}

// run answers one page and the token of the next.
func run[T any](ctx context.Context, s *Snapshot, l listing, page Page, scan func(row pgx.Row, lead ...any) (T, error)) ([]T, string, error) {
	sortExpr, order := l.sort, " ORDER BY "+l.sort+", "+l.id
	if l.sort == "" {
		sortExpr, order = "''", " ORDER BY "+l.id+" DESC"
	}
	if page.Token != "" {
		c, err := decodeCursor(l.name, page.Token)
		if err != nil {
			return nil, "", err
		}
		if l.sort == "" {
			l.and(l.id+" < ?::uuid", c.ID)
		} else {
			l.and("("+l.sort+", "+l.id+") > (?::text, ?::uuid)", c.Sort, c.ID)
		}
	}
	sql := "SELECT " + sortExpr + ", " + l.id + "::text, " + l.columns + " FROM " + l.from
	if len(l.where) > 0 {
		sql += " WHERE " + strings.Join(l.where, " AND ")
	}
	limit := page.limit()
	rows, err := s.tx.Query(ctx, fmt.Sprintf("%s%s LIMIT %d", sql, order, limit+1), l.args...)
	if err != nil {
		return nil, "", fmt.Errorf("list %s: %w", l.name, err)
	}
	defer rows.Close()
	var items []T
	last, next := cursor{List: l.name}, ""
	for rows.Next() {
		if len(items) == limit {
			next = last.encode()
			break
		}
		item, err := scan(rows, &last.Sort, &last.ID)
		if err != nil {
			return nil, "", fmt.Errorf("list %s: %w", l.name, err)
		}
		items = append(items, item)
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return nil, "", fmt.Errorf("list %s: %w", l.name, err)
	}
	return items, next, nil
}
