package saga

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

// releaseAll makes the runs that owner has leased due at once. A driver calls it when it drives nothing: at its start
// and at its end. The driver that leases the runs next closes their attempts as lost.
func (c *Core) releaseAll(ctx context.Context, owner string) (int64, error) {
	tag, err := pg.Exec(ctx, c.db, releaseOwned, owner)
	if err != nil {
		return 0, fmt.Errorf("release leases of %s: %w", owner, err)
	}
	return tag.RowsAffected(), nil
}

// beforeStuck calls the definition's BeforeStuck, which locks the rows that come before the run in the order of locks.
func (c *Core) beforeStuck(ctx context.Context, tx pgx.Tx, runID string) error {
	var workspaceID, name string
	err := pg.QueryRow(ctx, tx, runDefinition, runID).Scan(&workspaceID, &name)
	if err != nil {
		return fmt.Errorf("read run %s: %w", runID, err)
	}
	if def, ok := c.registry.Newest(name); ok && def.BeforeStuck != nil {
		if err := def.BeforeStuck(ctx, tx, workspaceID); err != nil {
			return fmt.Errorf("lock what the run holds: %w", err)
		}
	}
	return nil
}

// quarantine takes one unreadable run out of the queue, so that it does not block the leasing of others: the run
// becomes `stuck` with the reason why, and an operator decides.
func (c *Core) quarantine(ctx context.Context, runID, why string) error {
	err := pg.InTx(ctx, c.db, func(ctx context.Context, tx pgx.Tx) error {
		if err := c.beforeStuck(ctx, tx, runID); err != nil {
			return err
		}
		for _, s := range []*pg.Statement{lockRuns, keepOpen} {
			if err := pg.Queue(ctx, tx, s, []string{runID}); err != nil {
				return fmt.Errorf("lock run: %w", err)
			}
		}
		r, err := pg.One[Run](ctx, tx, quarantineRun, runID, why)
		if err != nil {
			return fmt.Errorf("quarantine run: %w", err)
		}
		closed, err := attempts(ctx, tx, loseOpenAttempts, runID)
		if err != nil {
			return err
		}
		_, err = pg.Exec(ctx, tx, quarantineWorkspace, runID, why)
		if err != nil {
			return fmt.Errorf("mark workspace: %w", err)
		}
		// OnStuck is called as for any run that is stuck: that of its definition, or of the newest definition of that name.
		def, ok := c.registry.Get(r.Definition, r.DefVersion)
		if !ok {
			def, ok = c.registry.Newest(r.Definition)
		}
		if ok && def.OnStuck != nil {
			public := "its run is unreadable: " + why
			e := &StepError{
				Layer: commonv1.OwnerLayer_OWNER_LAYER_WORKFLOW, Reason: commonv1.Reason_REASON_INTERNAL,
				Public: public,
			}
			if err := def.OnStuck(ctx, tx, r.WorkspaceID, e); err != nil {
				return fmt.Errorf("tell of stuck run: %w", err)
			}
		}
		var j eventBuffer
		j.run(&r)
		for i := range closed {
			j.step(&closed[i])
		}
		j.decided(ctx, &r)
		if w, err := GetWorkspace(ctx, tx, r.WorkspaceID); err == nil {
			// A workspace that cannot be shown is announced by the run alone.
			_ = j.workspace(&w)
		}
		return j.flush(ctx, tx)
	})
	if err != nil {
		return fmt.Errorf("quarantine run %s: %w", runID, err)
	}
	c.appended.Notify()
	c.stats.Quarantined.Add(1)
	return nil
}
