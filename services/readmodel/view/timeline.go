package view

import (
	"context"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/status"
)

// Timeline returns a workspace, its newest 100 runs (newest first, those that a reset has archived too) and the items
// of one run: of the run that is named, else of the workspace's current run. A run of another workspace is fault
// not_found, whichever tenant owns it.
func (s *Snapshot) Timeline(ctx context.Context, ref, runID string) (*readmodelv1.GetTimelineResponse, error) {
	w, err := s.Workspace(ctx, ref)
	if err != nil {
		return nil, err
	}
	runs, _, err := s.Runs(ctx, RunFilter{WorkspaceID: w.GetWorkspaceId()}, list.Page{Size: list.DefaultSize})
	if err != nil {
		return nil, err
	}
	out := &readmodelv1.GetTimelineResponse{Workspace: w, Runs: runs}
	shown, err := s.shownRun(ctx, w, runs, runID)
	if err != nil || shown == nil {
		return out, err
	}
	attempts, err := s.Steps(ctx, []string{shown.GetRunId()})
	if err != nil {
		return nil, err
	}
	out.Items = list.ShownAll(s.scope, status.Timeline(shown, attempts, s.Now))
	if out.History, err = s.history(ctx, runs); err != nil {
		return nil, err
	}
	for _, b := range out.GetHistory() {
		b.Shown = b.GetRunId() == shown.GetRunId()
	}
	return out, nil
}

// shownRun returns the run with the requested id, else the workspace's current run; nil if there was none yet.
func (s *Snapshot) shownRun(ctx context.Context, w *readmodelv1.Workspace, runs []*lifecyclev1.Run,
	id string,
) (*lifecyclev1.Run, error) {
	if id != "" {
		id = strings.ToLower(id)
		found, _, err := s.Runs(ctx, RunFilter{WorkspaceID: w.GetWorkspaceId(), IDs: list.OneID(id)}, list.Page{Size: 1})
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fault.New(commonv1.Reason_REASON_NOT_FOUND, "the workspace has no run "+fault.Named(id),
				fault.Remedy("name one of the runs that its timeline lists"))
		}
		return found[0], nil
	}
	for _, r := range runs {
		if r.GetRunId() == w.GetRunId() {
			return r, nil
		}
	}
	return first(runs), nil
}

type lastStepRow struct {
	RunID string `db:"run_id" expr:"@.run_id::text"`
	Body  []byte `db:"body"`
}

var lastStepsOfRuns = pg.Define(pg.RoleReadmodel, "view.last_steps_of_runs", `
	SELECT DISTINCT ON (t.run_id)
		`+pg.Columns[lastStepRow]("t")+` FROM readmodel.step t JOIN readmodel.run r ON r.run_id = t.run_id
	WHERE r.run_id = ANY($2::uuid[]) AND t.run_id = ANY($2::uuid[]) AND t.direction = 'do'
		AND ($1::uuid IS NULL OR r.tenant_id = $1)
	ORDER BY t.run_id, t.step DESC, t.attempt DESC`)

// history returns a summary of each run.
func (s *Snapshot) history(ctx context.Context, runs []*lifecyclev1.Run) ([]*readmodelv1.RunBrief, error) {
	ids := make([]string, 0, len(runs))
	for _, r := range runs {
		ids = append(ids, r.GetRunId())
	}
	rows, err := pg.All[lastStepRow](ctx, s.tx, lastStepsOfRuns, s.scope.Arg(), ids)
	if err != nil {
		return nil, fmt.Errorf("read the last steps of runs: %w", err)
	}
	last := map[string]*lifecyclev1.StepAttempt{} // of which only the state and the name are used
	for _, row := range rows {
		if last[row.RunID], err = decode[lifecyclev1.StepAttempt](row.Body); err != nil {
			return nil, fmt.Errorf("read the last steps of runs: %w", err)
		}
	}
	out := make([]*readmodelv1.RunBrief, 0, len(runs))
	for _, r := range runs {
		b := &readmodelv1.RunBrief{
			RunId: r.GetRunId(), Kind: r.GetKind(), State: r.GetState(), StartedAt: r.GetCreatedAt(), EndedAt: r.GetFinishedAt(),
			Error: r.GetError(), ErrorCode: r.GetErrorCode(), ErrorLayer: r.GetErrorLayer(),
		}
		b.FailedStep = status.FailedStep(r, last[r.GetRunId()])
		out = append(out, b)
	}
	return out, nil
}
