package saga

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// Verb is the result of an operator's verb on a run.
type Verb struct {
	Run     runs.Run
	Changed bool   // false: the run was in that state already
	Pos     string // position token; empty if nothing changed
}

// Amend replaces the input of a run that is at the given step of its forward phase. The step reads it when its function
// is called next, which is at once if the step is parked with WakeOnSignal. It returns a conflict if the run is no
// longer at that step, or is being cancelled.
func (c *Core) Amend(ctx context.Context, tx pgx.Tx, runID, step string, input any) (Verb, error) {
	raw, err := json.Marshal(input)
	if err != nil {
		return Verb{}, fmt.Errorf("amend run: marshal input: %w", err)
	}
	r, err := pg.One[runs.Run](ctx, tx, amendRun, runID, step, raw)
	if pg.IsNoRows(err) {
		return Verb{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the operation went on meanwhile")
	}
	if err != nil {
		return Verb{}, fmt.Errorf("amend run: %w", err)
	}
	c.makesDue(tx)
	var buffer runs.Buffer
	buffer.Run(&r)
	pos, err := buffer.FlushPos(ctx, tx)
	return Verb{Run: r, Changed: true, Pos: pos}, err
}

func (c *Core) withWorkspace(ctx context.Context, tx pgx.Tx, r *runs.Run, state, code, text string) (Verb, error) {
	var buffer runs.Buffer
	buffer.Run(r)
	if err := buffer.Touch(ctx, tx, workspace.Change{
		ID: r.WorkspaceID, RunID: r.ID, State: state, Code: code, Error: text,
	}); err != nil {
		return Verb{}, err
	}
	pos, err := buffer.FlushPos(ctx, tx)
	return Verb{Run: *r, Changed: true, Pos: pos}, err
}

func lockRun(ctx context.Context, tx pgx.Tx, runID string) (*runs.Run, error) {
	r, err := pg.One[runs.Run](ctx, tx, lockRunByID, runID)
	if pg.IsNoRows(err) {
		return nil, fault.NoSuch("operation", runID)
	}
	if err != nil {
		return nil, fmt.Errorf("lock run %s: %w", runID, err)
	}
	return &r, nil
}
