package view

import (
	"context"
	"fmt"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// RunFilter narrows a list of runs. Zero fields do not.
type RunFilter struct {
	WorkspaceID string
	LiveOnly    bool
	IDs         []string
}

// Runs returns one page, newest first.
func (s *Snapshot) Runs(ctx context.Context, f RunFilter, page list.Page) ([]*lifecyclev1.Run, string, error) {
	l := s.perWorkspace(&runLayout, listRuns, PerWorkspaceFilter{WorkspaceID: f.WorkspaceID, IDs: f.IDs})
	l.When(f.LiveOnly, live)
	items, next, err := run(ctx, s, l, page, fromBody[lifecyclev1.Run])
	return list.ShownAll(s.scope, items), next, err
}

// stepsPage is how many attempts one statement reads.
const stepsPage = 10000

// stepRow is an attempt with its place in the order of the attempts.
type stepRow struct {
	RunID     string `db:"run_id" expr:"@.run_id::text"`
	Step      int32  `db:"step"`
	Direction string `db:"direction"`
	Attempt   int32  `db:"attempt"`
	Body      []byte `db:"body"`
}

// stepsOfRuns reads the attempts of runs, those after a place in their order if after is true.
var stepsOfRuns = pg.DefineDynamic(pg.RoleReadmodel, "view.steps_of_runs", func(after bool) string {
	next := ""
	if after {
		next = " AND (t.run_id, t.step, t.direction, t.attempt) > ($4::uuid, $5::integer, $6::text, $7::integer)"
	}
	return `SELECT ` + pg.Columns[stepRow]("t") + ` FROM readmodel.step t JOIN readmodel.run r ON r.run_id = t.run_id
	WHERE r.run_id = ANY($2::uuid[]) AND ($1::uuid IS NULL OR r.tenant_id = $1) AND t.run_id = ANY($2::uuid[])` + next + `
	ORDER BY t.run_id, t.step, t.direction, t.attempt LIMIT $3`
}, false, true)

// Steps returns all attempts of runs, by run and in the order of the steps. It is scoped by the runs' tenants. The
// outputs that a step left for later steps are internal to the saga and are not returned.
func (s *Snapshot) Steps(ctx context.Context, runIDs []string) ([]*lifecyclev1.StepAttempt, error) {
	var steps []*lifecyclev1.StepAttempt
	args := []any{s.scope.Arg(), runIDs, stepsPage}
	for after := false; ; after = true {
		rows, err := pg.All[stepRow](ctx, s.tx, stepsOfRuns.For(after), args...)
		if err != nil {
			return nil, fmt.Errorf("list steps: %w", err)
		}
		for _, row := range rows {
			a, err := decode[lifecyclev1.StepAttempt](row.Body)
			if err != nil {
				return nil, fmt.Errorf("list steps: %w", err)
			}
			a.Output = nil
			steps = append(steps, list.Shown(s.scope, s.scope.Step(a)))
		}
		if len(rows) < stepsPage {
			return steps, nil
		}
		last := rows[len(rows)-1]
		args = append(args[:3], last.RunID, last.Step, last.Direction, last.Attempt)
	}
}
