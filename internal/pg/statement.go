package pg

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Statement is one SQL statement of the product, with a name and the roles that run it. It is made by the Define
// functions, when the program starts, and never changes. Its name stands before its text as a comment, so that
// pg_stat_activity, pg_stat_statements and the server's log show it.
type Statement struct {
	name       string
	text       string
	roles      []string
	unprepared string
}

// Name returns the name, such as "saga.lease_runs".
func (s *Statement) Name() string { return s.name }

// SQL returns the text as the server gets it.
func (s *Statement) SQL() string { return s.text }

// Roles returns the roles that run the statement.
func (s *Statement) Roles() []string { return slices.Clone(s.roles) }

// Unprepared returns why the statement cannot be prepared on a database that has only been migrated, or "".
func (s *Statement) Unprepared() string { return s.unprepared }

// registry holds the statements that the Define functions made.
var registry struct {
	mu       sync.Mutex
	names    map[string]bool
	prepared map[string]*Statement // by name and variant
}

// statementName matches a valid name: the package, then the operation.
var statementName = regexp.MustCompile(`^[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+$`)

// refuse stops the program: definitions are constant, so a program with a wrong one must not start.
func refuse(format string, args ...any) {
	panic(fmt.Sprintf(format, args...)) //nolint:forbidigo // see above
}

// register reserves a name, and refuses one that is taken.
func register(name string, roles []string) {
	if !statementName.MatchString(name) {
		refuse("define statement %q: the name must look like package.what_it_does", name)
	}
	if len(roles) == 0 {
		refuse("define statement %s: no role runs it", name)
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.names[name] {
		refuse("define statement %s: the name is taken", name)
	}
	if registry.names == nil {
		registry.names, registry.prepared = map[string]bool{}, map[string]*Statement{}
	}
	registry.names[name] = true
}

// keep adds a statement to those that Statements returns.
func keep(variant string, s *Statement) *Statement {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	registry.prepared[s.name+variant] = s
	return s
}

func newStatement(name, sql string, roles []string) *Statement {
	return &Statement{name: name, text: "/* " + name + " */ " + sql, roles: roles}
}

// Define registers a statement that role runs. It is called in declarations of package variables only. It panics if the
// name is malformed or taken.
func Define(role, name, sql string) *Statement { return DefineShared([]string{role}, name, sql) }

// DefineShared registers a statement that several roles run, each with the same text. See Define.
func DefineShared(roles []string, name, sql string) *Statement {
	register(name, roles)
	return keep("", newStatement(name, sql, roles))
}

// ByRole is a statement whose text depends on the role that runs it, such as one over a table that each service has in
// its own schema.
type ByRole struct{ of map[string]*Statement }

// DefineByRole registers a statement for each role; compose returns its text. See Define.
func DefineByRole(roles []string, name string, compose func(role string) string) *ByRole {
	register(name, roles)
	b := &ByRole{of: make(map[string]*Statement, len(roles))}
	for _, role := range roles {
		b.of[role] = keep(" as "+role, newStatement(name, compose(role), []string{role}))
	}
	return b
}

// For returns the statement of a role. It panics if the statement was not defined for it.
func (b *ByRole) For(role string) *Statement {
	s, ok := b.of[role]
	if !ok {
		refuse("no such statement for role %q, only for %q", role, slices.Sorted(maps.Keys(b.of)))
	}
	return s
}

// Dynamic is a statement that is composed when it is run, from a closed set of parts that P selects: the conditions of
// a list, for example. Values never become part of the text: they are arguments.
type Dynamic[P any] struct {
	name       string
	roles      []string
	unprepared string
	compose    func(P) string
}

// DefineDynamic registers a statement that compose makes from P. The samples stand for all values of P: each condition,
// each order and each table must be in at least one of them, since the test prepares the samples. See Define.
func DefineDynamic[P any](role, name string, compose func(P) string, samples ...P) *Dynamic[P] {
	register(name, []string{role})
	if len(samples) == 0 {
		refuse("define statement %s: no samples", name)
	}
	d := &Dynamic[P]{name: name, roles: []string{role}, compose: compose}
	for i, p := range samples {
		keep(fmt.Sprintf(" sample %d", i), d.For(p))
	}
	return d
}

// DefineUnprepared registers a statement that cannot be prepared on a migrated database, for the reason given: it names
// an object that is made while the product runs, such as the schema of one workspace. See Define.
func DefineUnprepared[P any](role, name, reason string, compose func(P) string) *Dynamic[P] {
	register(name, []string{role})
	if reason == "" {
		refuse("define statement %s: no reason not to prepare it", name)
	}
	d := &Dynamic[P]{name: name, roles: []string{role}, unprepared: reason, compose: compose}
	keep("", &Statement{name: name, roles: d.roles, unprepared: reason})
	return d
}

// For composes the statement for p.
func (d *Dynamic[P]) For(p P) *Statement {
	s := newStatement(d.name, d.compose(p), d.roles)
	s.unprepared = d.unprepared
	return s
}

// Statements returns the statements that the packages of this program define, by name: each variant of those that
// depend on the role, and the samples of those that are composed.
func Statements() []*Statement {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	out := slices.Collect(maps.Values(registry.prepared))
	slices.SortFunc(
		out, func(a, b *Statement) int { return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.text, b.text)) },
	)
	return out
}

// Exec runs a statement and returns its command tag.
func Exec(ctx context.Context, q Querier, s *Statement, args ...any) (pgconn.CommandTag, error) {
	return q.Exec(ctx, s.text, args...)
}

// Query runs a statement and returns its rows, which the caller reads to the end or closes.
func Query(ctx context.Context, q Querier, s *Statement, args ...any) (pgx.Rows, error) {
	return q.Query(ctx, s.text, args...)
}

// QueryRow runs a statement and returns its first row. Scan reports pgx.ErrNoRows if there is none.
func QueryRow(ctx context.Context, q Querier, s *Statement, args ...any) pgx.Row {
	return q.QueryRow(ctx, s.text, args...)
}

// One runs a statement and returns its only row as a T, a struct whose fields have the names of the columns in `db`
// tags. Without a row the error is pgx.ErrNoRows; with several the first one counts.
func One[T any](ctx context.Context, q Querier, s *Statement, args ...any) (T, error) {
	return collectOne(ctx, q, pgx.RowToStructByName[T], s, args)
}

// All runs a statement and returns its rows as Ts. See One.
func All[T any](ctx context.Context, q Querier, s *Statement, args ...any) ([]T, error) {
	return collect(ctx, q, pgx.RowToStructByName[T], s, args)
}

// Value runs a statement of one column and returns its only row. Without a row the error is pgx.ErrNoRows.
func Value[T any](ctx context.Context, q Querier, s *Statement, args ...any) (T, error) {
	return collectOne(ctx, q, pgx.RowTo[T], s, args)
}

// Values runs a statement of one column and returns its rows.
func Values[T any](ctx context.Context, q Querier, s *Statement, args ...any) ([]T, error) {
	return collect(ctx, q, pgx.RowTo[T], s, args)
}

func collectOne[T any](ctx context.Context, q Querier, read pgx.RowToFunc[T], s *Statement, args []any) (T, error) {
	rows, err := q.Query(ctx, s.text, args...)
	if err != nil {
		var none T
		return none, err
	}
	return pgx.CollectOneRow(rows, read)
}

func collect[T any](ctx context.Context, q Querier, read pgx.RowToFunc[T], s *Statement, args []any) ([]T, error) {
	rows, err := q.Query(ctx, s.text, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, read)
}
