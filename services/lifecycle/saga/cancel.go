package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// Cancel requests that a run be stopped and undone, and that agents stop the tasks of its steps. It returns at once:
// the driver cancels the step's context, waits for the grace, and compensates. A run that is cancelled or compensates
// already is left as it is; one that is stuck, has succeeded or has failed, or whose definition is Uncancellable, is
// refused, and tx is to be rolled back.
func (c *Core) Cancel(ctx context.Context, tx pgx.Tx, runID, by, reason string) (Verb, error) {
	if err := c.withdrawTasks(ctx, tx, runID); err != nil {
		return Verb{}, err
	}
	r, err := lockRun(ctx, tx, runID)
	if err != nil {
		return Verb{}, err
	}
	def, known := c.registry.Get(r.Definition, r.DefVersion)
	switch {
	case r.State == runs.Compensating, r.CancelAt != nil && r.Live() && r.State != runs.Stuck:
		return Verb{Run: *r}, nil
	case r.State == runs.Stuck:
		return Verb{}, c.stuckFault(r)
	case r.State == runs.Succeeded:
		return Verb{}, fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the operation has succeeded",
			fault.Remedy("decommission the workspace instead"),
			fault.Unmet("the operation has succeeded"))
	case r.State == runs.Failed:
		return Verb{}, fault.New(commonv1.Reason_REASON_STATE_TERMINAL, "the operation has ended already",
			fault.Unmet("the operation has failed"))
	case known && def.Uncancellable:
		return Verb{}, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, r.Kind+" cannot be cancelled",
			fault.Conflicting(r.ID),
			fault.Unmet("the open operation is a "+r.Kind+", which cannot be cancelled"),
			fault.Remedy("wait until it has ended, or is stuck"))
	}
	*r, err = pg.One[runs.Run](ctx, tx, cancelRun, r.ID, by, reason)
	if err != nil {
		return Verb{}, fmt.Errorf("cancel run: %w", err)
	}
	c.cancelled.Store(true)
	c.makesDue(tx)
	return c.withWorkspace(ctx, tx, r, names.Of(commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING),
		names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED), reason)
}

// withdrawTasks requests that agents stop the tasks of a run's steps. It is called before the run's row is locked.
func (c *Core) withdrawTasks(ctx context.Context, tx pgx.Tx, runID string) error {
	if c.withdraw == nil {
		return nil
	}
	if err := c.withdraw(ctx, tx, runID, "the operation is being cancelled"); err != nil {
		return fmt.Errorf("withdraw tasks of run %s: %w", runID, err)
	}
	return nil
}

// CancelParked ends a run that is parked at a step on its way forward: it is cancelled, and nothing is undone. Its
// claims stay for the run that is started in the same transaction, so that the workspace is never without a run and no
// other request can start one in between. No driver has a parked run leased, so that no step is under way; its fence is
// raised nevertheless. It returns a conflict if the run is no longer at that step, or is leased.
func (c *Core) CancelParked(ctx context.Context, tx pgx.Tx, runID, step, by, reason string) (Verb, error) {
	code, layer := names.Of(commonv1.Reason_REASON_CANCEL_REQUESTED), names.Of(commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW)
	text := "cancelled by " + by + ": " + reason
	if err := c.withdrawTasks(ctx, tx, runID); err != nil {
		return Verb{}, err
	}
	r, err := pg.One[runs.Run](ctx, tx, cancelParked, runID, step, by, reason, code, text, layer)
	if pg.IsNoRows(err) {
		return Verb{}, fault.New(commonv1.Reason_REASON_CONFLICT, "the operation went on meanwhile")
	}
	if err != nil {
		return Verb{}, fmt.Errorf("cancel parked run: %w", err)
	}
	closed, err := runs.ChangeAttempts(ctx, tx, cancelOpenAttempts, r.ID, code, text, layer)
	if err != nil {
		return Verb{}, err
	}
	var buffer runs.Buffer
	buffer.Run(&r)
	for i := range closed {
		buffer.Attempt(&closed[i])
	}
	buffer.Decided(ctx, &r)
	pos, err := buffer.FlushPos(ctx, tx)
	if err != nil {
		return Verb{}, err
	}
	c.stats.Failed.Add(1)
	return Verb{Run: r, Changed: true, Pos: pos}, nil
}
