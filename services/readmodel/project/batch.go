package project

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/project/rowbody"
)

// Tables in which an earlier row determines the value of a later one, or which rows are deleted with it, so that rows
// which depend on each other are written in the order of their events. Of sessions those of one node depend on each
// other, and of observations those of one workspace, and the rows of that workspace.
const (
	tableSession   = "session"
	tableObserved  = "observed"
	tableWorkspace = "workspace"
)

// applyAll applies events together. The result is as if each had been applied by itself, but of the rows of one key
// only the last is written, and a table's rows in one statement.
func (a applier) applyAll(ctx context.Context, tx pgx.Tx, records []events.Record) error {
	b := batch{
		applier: a, rows: map[string]map[string]row{}, counts: map[any]int{}, observed: observed{last: map[any]int{}},
	}
	for _, r := range records {
		read := rowsOf[r.Kind]
		if read == nil {
			continue // a kind that is not projected
		}
		rows, err := read(r)
		if err != nil {
			return fmt.Errorf("project %s: %w", r.Kind, err)
		}
		for _, w := range rows {
			b.add(w)
		}
	}
	if err := b.flush(ctx, tx); err != nil {
		return err
	}
	if err := a.queue(ctx, tx, records); err != nil {
		return err
	}
	return events.Later(failpoint.Hit("readmodel.project.before_commit"))
}

// batch collects the rows of several events.
type batch struct {
	applier
	rows map[string]map[string]row // by table and key

	sessions [][]row     // the n-th rows of all nodes
	counts   map[any]int // of rows of sessions, by node
	observed observed
}

func (b *batch) add(w row) {
	switch w.table {
	case tableSession:
		b.addSession(w)
		return
	case tableObserved:
		b.addObserved(w)
		return
	}
	if b.rows[w.table] == nil {
		b.rows[w.table] = map[string]row{}
	}
	t, key := tables[w.table], w.key()
	if held, ok := b.rows[w.table][key]; ok && (t.immutable || held.version() > w.version()) {
		return
	}
	b.rows[w.table][key] = w
}

// key returns the key of a row as text.
func (w row) key() string {
	var key strings.Builder
	for _, v := range w.values[:len(tables[w.table].key)] {
		fmt.Fprint(&key, v, "/")
	}
	return key.String()
}

// version returns the version of a row that is not immutable: the value after the key.
func (w row) version() int64 {
	version, _ := w.values[len(tables[w.table].key)].(int64)
	return version
}

// flush writes the collected rows: observations, sessions, then the others in the order of the names of the tables and
// of their keys.
func (b *batch) flush(ctx context.Context, tx pgx.Tx) error {
	for _, s := range b.observed.stages {
		if err := b.putObserved(ctx, tx, s); err != nil {
			return err
		}
	}
	for _, rows := range b.sessions {
		if err := b.putSessions(ctx, tx, rows); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.rows)) {
		if err := b.flushTable(ctx, tx, name); err != nil {
			return err
		}
	}
	return nil
}

func (b *batch) flushTable(ctx context.Context, tx pgx.Tx, name string) error {
	held := b.rows[name]
	if len(held) == 0 {
		return nil
	}
	delete(b.rows, name)
	_, err := b.put(ctx, tx, inOrder(slices.Collect(maps.Values(held)))...)
	return err
}

// inOrder sorts rows of one table by their keys, so that locks are taken in one order.
func inOrder(rows []row) []row {
	slices.SortFunc(rows, func(a, b row) int { return strings.Compare(a.key(), b.key()) })
	return rows
}

// put writes rows of one table and of different keys. It returns how many of them were new.
func (b *batch) put(ctx context.Context, tx pgx.Tx, rows ...row) (int64, error) {
	name := rows[0].table
	columns, err := valuesByColumn(rows)
	if err != nil {
		return 0, err
	}
	tag, err := pg.Exec(ctx, tx, b.sql.upserts[name], columns...)
	if err != nil {
		return 0, fmt.Errorf("project into %s: %w", name, err)
	}
	return tag.RowsAffected(), nil
}

// valuesByColumn returns the arguments of an upsert: for each column the values of all rows, with encoded bodies.
func valuesByColumn(rows []row) ([]any, error) {
	columns := make([]any, len(rows[0].values))
	for i := range columns {
		values := make([]any, len(rows))
		for n, w := range rows {
			values[n] = w.values[i]
			if body, ok := values[n].(*rowbody.Content); ok {
				encoded, err := body.Encode()
				if err != nil {
					return nil, err
				}
				values[n] = encoded
			}
		}
		columns[i] = values
	}
	return columns, nil
}

// addSession adds a row of a session to the rows that are written with it: each of another node.
func (b *batch) addSession(w row) {
	node := w.values[sessionNode]
	n := b.counts[node]
	b.counts[node]++
	if n == len(b.sessions) {
		b.sessions = append(b.sessions, nil)
	}
	b.sessions[n] = append(b.sessions[n], w)
}

// sessionNode is the place of the node's id among the values of a row of a session.
const sessionNode = 2

// putSessions writes rows of sessions of different nodes, in the order of the sessions, and prunes the nodes' sessions.
func (b *batch) putSessions(ctx context.Context, tx pgx.Tx, rows []row) error {
	changed, err := b.put(ctx, tx, inOrder(rows)...)
	if err != nil || changed == 0 {
		return err
	}
	nodes := make([]any, len(rows))
	for i, w := range rows {
		nodes[i] = w.values[sessionNode]
	}
	if _, err := pg.Exec(ctx, tx, b.sql.prune, nodes); err != nil {
		return fmt.Errorf("prune sessions: %w", err)
	}
	return nil
}
