package lease

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// beforeStuck calls the definition's BeforeStuck, which locks the rows that come before the run in the order of locks.
func (k *Keeper) beforeStuck(ctx context.Context, tx pgx.Tx, runID string) error {
	run, err := pg.One[struct {
		WorkspaceID string `db:"workspace_id"`
		Definition  string `db:"definition"`
	}](ctx, tx, runDefinition, runID)
	if err != nil {
		return fmt.Errorf("read run %s: %w", runID, err)
	}
	if def, ok := k.core.Registry().Newest(run.Definition); ok && def.BeforeStuck != nil {
		if err := def.BeforeStuck(ctx, tx, run.WorkspaceID); err != nil {
			return fmt.Errorf("lock rows before stuck run: %w", err)
		}
	}
	return nil
}

// quarantine takes one unreadable run out of the queue, so that it does not block the leasing of others: the run
// becomes `stuck` with the reason why, and an operator decides. No driver can drive such a run, so quarantine changes
// it under the lock on its row, whatever its fence is. A run that is driven becomes stuck by its driver instead, when a
// step has failed for good that cannot be undone (exhausted of package drive), with a compare-and-set on the fence.
func (k *Keeper) quarantine(ctx context.Context, runID, why string) error {
	err := pg.InTx(ctx, k.core.DB(), func(ctx context.Context, tx pgx.Tx) error {
		if err := k.beforeStuck(ctx, tx, runID); err != nil {
			return err
		}
		if err := LockRuns(ctx, tx, runID); err != nil {
			return err
		}
		if err := runs.KeepOpen(ctx, tx, runID); err != nil {
			return err
		}
		r, err := pg.One[runs.Run](ctx, tx, quarantineRun, runID, why)
		if err != nil {
			return fmt.Errorf("quarantine run: %w", err)
		}
		closed, err := runs.ChangeAttempts(ctx, tx, loseOpenAttempts, runID)
		if err != nil {
			return err
		}
		if err := workspace.MarkUnreadable(ctx, tx, runID, why); err != nil {
			return err
		}
		// OnStuck is called as for any run that is stuck: that of its definition, or of the newest definition of that name.
		def, ok := k.core.Registry().Get(r.Definition, r.DefVersion)
		if !ok {
			def, ok = k.core.Registry().Newest(r.Definition)
		}
		if ok && def.OnStuck != nil {
			public := "its run is unreadable: " + why
			e := &saga.StepError{
				Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_INTERNAL,
				Public: public,
			}
			if err := def.OnStuck(ctx, tx, r.WorkspaceID, e); err != nil {
				return fmt.Errorf("apply stuck run: %w", err)
			}
		}
		var buffer runs.Buffer
		buffer.Run(&r)
		for i := range closed {
			buffer.Attempt(&closed[i])
		}
		buffer.Decided(ctx, &r)
		if w, err := workspace.Get(ctx, tx, r.WorkspaceID); err == nil {
			// A workspace that cannot be shown is announced by the run alone.
			_ = buffer.Workspace(&w)
		}
		return buffer.Flush(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("quarantine run %s: %w", runID, err)
	}
	k.core.Appended().Notify()
	k.core.Stats().Quarantined.Add(1)
	return nil
}
