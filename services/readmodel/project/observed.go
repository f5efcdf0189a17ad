package project

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// The places of the ids among the values of a row of an observation.
const (
	observedWorkspace = iota
	observedNode
)

// observed has the observations of a batch in stages, which are written one after the other.
type observed struct {
	stages []stage
	last   map[any]int // the number of stages that have an observation of a workspace, by workspace
}

// stage has one observation of each of its workspaces, and the rows of these workspaces that are written before them:
// the current node of a workspace determines which of its observations are deleted.
type stage struct {
	workspaces map[string]row // by key
	rows       map[any]row    // by workspace
}

// addObserved adds an observation to the stage after the one with the last observation of its workspace. If that one is
// of the same node, and the workspace has not changed since, only the later version of the two is written.
func (b *batch) addObserved(w row) {
	workspace := w.values[observedWorkspace]
	key := row{table: tableWorkspace, values: []any{workspace}}.key()
	changed, isChanged := b.rows[tableWorkspace][key]
	n := b.observed.last[workspace]
	if n > 0 && !isChanged {
		rows := b.observed.stages[n-1].rows
		if held := rows[workspace]; held.values[observedNode] == w.values[observedNode] {
			if held.version() <= w.version() {
				rows[workspace] = w
			}
			return
		}
	}
	if n == len(b.observed.stages) {
		b.observed.stages = append(b.observed.stages, stage{workspaces: map[string]row{}, rows: map[any]row{}})
	}
	s := b.observed.stages[n]
	if isChanged {
		delete(b.rows[tableWorkspace], key)
		s.workspaces[key] = changed
	}
	s.rows[workspace] = w
	b.observed.last[workspace] = n + 1
}

// putObserved writes the rows of a stage, and deletes the observations of earlier nodes of the workspaces whose
// observations were new.
func (b *batch) putObserved(ctx context.Context, tx pgx.Tx, s stage) error {
	if len(s.workspaces) > 0 {
		if _, err := b.put(ctx, tx, inOrder(slices.Collect(maps.Values(s.workspaces)))...); err != nil {
			return err
		}
	}
	columns, err := valuesByColumn(inOrder(slices.Collect(maps.Values(s.rows))))
	if err != nil {
		return err
	}
	changed, err := pg.Values[string](ctx, tx, b.sql.upserts[tableObserved], columns...)
	if err != nil {
		return fmt.Errorf("project into %s: %w", tableObserved, err)
	}
	if len(changed) == 0 {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, b.sql.fade, changed); err != nil {
		return fmt.Errorf("prune observations: %w", err)
	}
	return nil
}
