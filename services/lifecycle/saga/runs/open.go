package runs

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// KeepOpen gives the open attempts of runs their rows, if they have none. The caller holds the locks of the runs' rows.
func KeepOpen(ctx context.Context, tx pgx.Tx, runIDs ...string) error {
	if err := pg.Queue(ctx, tx, keepOpen, runIDs); err != nil {
		return fmt.Errorf("keep attempts: %w", err)
	}
	return nil
}

// Open returns the attempt that is open in a run's row and has no row of its own.
func Open(run *Run) Attempt {
	a := Attempt{
		RunID: run.ID, Step: run.Step, Name: run.StepName(), Dir: run.Phase, Attempt: run.OpenAttempt,
		WorkspaceID: run.WorkspaceID, TenantID: run.TenantID, Fence: run.Fence, OpSeq: run.OpSeq, State: AttemptRunning,
		Version: 1,
	}
	a.IdemKey = a.RunID + "/" + a.Name + "/" + a.Dir
	if run.OpenSince != nil {
		a.StartedAt = *run.OpenSince
	}
	return a
}

// RangeSize is how many operation numbers a run is given at once. An attempt takes one, so that few runs need a second
// range. While a run is live no other run or reaper draws numbers of its workspace: the numbers that reapers draw
// afterwards are above the range.
const RangeSize = 64

// openRow selects, as columns of saga_step, the attempt that is open in the row of a run r and has no row of its own
// yet. The driver adds its deadline; the time after which it stalls is that of its definition, or this one.
const (
	openInto = `run_id, step, name, dir, attempt, workspace_id, tenant_id, fence, op_seq, idem_key, started_at,
		stall_after`
	openRow = `r.id, r.step, ` + stepName + `, r.phase, r.open_attempt, r.workspace_id, r.tenant_id, r.fence, r.op_seq,
		r.id || '/' || ` + stepName + ` || '/' || r.phase, r.open_since, interval '5 minutes'`
	stepName = `COALESCE(r.step_names[r.step + 1], '?')`
	// StepKey is the conflict target of an attempt's row.
	StepKey = `(run_id, step, dir, attempt)`
)
