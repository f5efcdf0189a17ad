package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// foreign returns a fault for a run that this build cannot drive: its driver would put the run aside again.
func (c *Core) foreign(r *runs.Run) error {
	if c.Drives(r) {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
		"this build cannot go on with the operation: "+r.StuckReason, fault.Conflicting(r.ID),
		fault.Unmet("this build does not know the steps of "+key(r.Definition, r.DefVersion)), fault.Remedy(c.stuckRemedy(r)))
}

// RetryUndo makes a stuck run try its step again from the first attempt of its policy. A run that is past its deadline
// gets a new one.
func (c *Core) RetryUndo(ctx context.Context, tx pgx.Tx, runID, by string) (Verb, error) {
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	if err := c.foreign(r); err != nil {
		return Verb{}, err
	}
	return c.unstick(ctx, tx, r, r.Step, "asked by "+by)
}

// SkipUndo skips the step at which a run is stuck: the claims that the step would have released become orphans, which
// record by and reason. The run goes on with the next step in its direction, or ends if there is none: as failed if it
// compensates, else as succeeded.
func (c *Core) SkipUndo(ctx context.Context, tx pgx.Tx, runID, by, reason string) (Verb, []claims.Claim, error) {
	if reason == "" {
		return Verb{}, nil, fault.New(commonv1.Reason_REASON_REASON_REQUIRED, "")
	}
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, nil, err
	}
	if err := c.foreign(r); err != nil {
		return Verb{}, nil, err
	}
	def, _ := c.registry.Get(r.Definition, r.DefVersion)
	orphans, err := claims.OrphanStep(ctx, tx, claims.Claimant{WorkspaceID: r.WorkspaceID, RunID: r.ID, Step: r.Step},
		def.Steps[r.Step].Kinds, by, reason)
	if err != nil {
		return Verb{}, nil, err
	}
	to := r.Step + 1
	if r.Phase == runs.Undo {
		to = def.Undoable(r.Step - 1)
	}
	if to < 0 || to >= len(def.Steps) {
		state, ws := runs.Failed, def.States.Failed
		if r.Phase == runs.Do {
			state, ws = runs.Succeeded, def.States.Succeeded
		}
		v, err := c.endStuck(ctx, tx, r, state, names.Of(ws))
		return v, orphans, err
	}
	v, err := c.unstick(ctx, tx, r, to, fmt.Sprintf("%q skipped by %s", r.StepName(), by))
	return v, orphans, err
}

// CloseStuck ends a stuck run as failed without undoing anything more. Its claims stay for the decommission that is
// started in the same transaction.
func (c *Core) CloseStuck(ctx context.Context, tx pgx.Tx, runID string) (Verb, error) {
	r, err := lockStuck(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	return c.endStuck(ctx, tx, r, runs.Failed, runs.Failed)
}

func (c *Core) endStuck(ctx context.Context, tx pgx.Tx, r *runs.Run, state, workspace string) (Verb, error) {
	var err error
	*r, err = pg.One[runs.Run](ctx, tx, endStuckRun, r.ID, state)
	if err != nil {
		return Verb{}, fmt.Errorf("end stuck run: %w", err)
	}
	return c.withWorkspace(ctx, tx, r, workspace, r.ErrorCode, r.Error)
}

func (c *Core) unstick(ctx context.Context, tx pgx.Tx, r *runs.Run, step int, why string) (Verb, error) {
	state, workspace := runs.Compensating, names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING)
	more := defaultDeadline
	if r.Phase == runs.Do {
		state = runs.Waiting
		if def, ok := c.registry.Get(r.Definition, r.DefVersion); ok {
			workspace, more = names.Of(def.States.Running), def.Deadline
		}
	}
	var err error
	*r, err = pg.One[runs.Run](ctx, tx, unstickRun, r.ID, state, step, why, more.Seconds())
	if err != nil {
		return Verb{}, fmt.Errorf("let run go on: %w", err)
	}
	c.makesDue(tx)
	return c.withWorkspace(ctx, tx, r, workspace, r.ErrorCode, r.Error)
}

func lockStuck(ctx context.Context, tx pgx.Tx, runID string) (*runs.Run, error) {
	r, err := lockRun(ctx, tx, runID)
	if err != nil {
		return nil, err
	}
	if r.State != runs.Stuck {
		return nil, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "only a run that is stuck can be helped this way",
			fault.Unmet("the operation is "+r.State+", not stuck"),
			fault.Remedy("let it go on, or cancel it"))
	}
	return r, nil
}
