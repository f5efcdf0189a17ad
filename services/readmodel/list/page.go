package list

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
	// DefaultSize is how many items a page has if its request names no size.
	DefaultSize = 100
	// MaxSize is how many items a page has at most.
	MaxSize = 1000
)

// Page selects a part of a list.
type Page struct {
	Size  int32
	Token string
}

// Limit returns how many items the page has at most.
func (p Page) Limit() int {
	switch {
	case p.Size <= 0:
		return DefaultSize
	case p.Size > MaxSize:
		return MaxSize
	default:
		return int(p.Size)
	}
}

// Cursor is the place at which a page ended. It grants no rights: the caller who presents it is scoped again.
type Cursor struct {
	List string `json:"l"`
	Sort string `json:"s,omitempty"`
	ID   string `json:"i"`
}

// Encode returns the page token that stands for the place.
func (c Cursor) Encode() string {
	raw, err := json.Marshal(c)
	if err != nil {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

// DecodeCursor returns the place of a page token of a list. Another list's token is fault invalid_argument.
func DecodeCursor(list, token string) (Cursor, error) {
	var c Cursor
	raw, err := base64.RawURLEncoding.DecodeString(token)
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil || c.List != list || !IsID(c.ID) || strings.ContainsRune(c.Sort, 0) {
		return Cursor{}, fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
			fault.Unmet("page_token: not from this list"), fault.Cause(err))
	}
	return c, nil
}

// Request is one request for a list.
type Request struct {
	Layout    *Layout
	Statement *pg.Dynamic[Parts]
	Where     []Condition
	Args      []any
}

// And adds a condition with its arguments.
func (l *Request) And(c Condition, args ...any) {
	l.Where, l.Args = append(l.Where, c), append(l.Args, args...)
}

// When adds a condition that applies only if the request asks for it.
func (l *Request) When(applies bool, c Condition, args ...any) {
	if applies {
		l.And(c, args...)
	}
}

// Place is the position of a row in the order of its list. Every row of a list embeds it.
type Place struct {
	Sort string `db:"page_sort"`
	ID   string `db:"page_id"`
}

func (p Place) at() Place { return p }

// Placed is a row of a list.
type Placed interface{ at() Place }

// Read returns the rows of one page, read with all, and the token of the next page.
func Read[R Placed](
	l Request, in Scope, page Page, all func(*pg.Statement, ...any) ([]R, error),
) ([]R, string, error) {
	if page.Token != "" {
		c, err := DecodeCursor(l.Layout.Name, page.Token)
		if err != nil {
			return nil, "", err
		}
		if l.Layout.Sort != "" {
			l.Args = append(l.Args, c.Sort)
		}
		l.Args = append(l.Args, c.ID)
	}
	limit := page.Limit()
	statement := l.Statement.For(Parts{Conditions: l.Where, after: page.Token != "", Scoped: !in.all})
	rows, err := all(statement, append(l.Args, limit+1)...)
	if err != nil {
		return nil, "", fmt.Errorf("list %s: %w", l.Layout.Name, err)
	}
	next := ""
	if len(rows) > limit {
		rows = rows[:limit]
		last := rows[limit-1].at()
		next = Cursor{List: l.Layout.Name, Sort: last.Sort, ID: last.ID}.Encode()
	}
	return rows, next, nil
}
