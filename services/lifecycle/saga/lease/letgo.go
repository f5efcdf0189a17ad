package lease

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// ReleaseAll makes the runs that the owner has leased due at once. A driver calls it when it drives nothing: at its
// start and at its end. The driver that leases the runs next closes their attempts as lost.
func (k *Keeper) ReleaseAll(ctx context.Context) (int64, error) {
	tag, err := pg.Exec(ctx, k.core.DB(), releaseOwned, k.terms.Owner)
	if err != nil {
		return 0, fmt.Errorf("release leases of %s: %w", k.terms.Owner, err)
	}
	return tag.RowsAffected(), nil
}

// LetGo makes a run due at once if the owner still has it leased under the fence of h, and returns whether it has.
func (k *Keeper) LetGo(ctx context.Context, h *Run) (bool, error) {
	tag, err := pg.Exec(ctx, k.core.DB(), letGoRun, h.Run.ID, h.Run.Fence, k.terms.Owner)
	if err != nil {
		return false, fmt.Errorf("let go of run: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// LockRuns locks runs in the order of their ids.
func LockRuns(ctx context.Context, tx pgx.Tx, runIDs ...string) error {
	if err := pg.Queue(ctx, tx, lockRuns, runIDs); err != nil {
		return fmt.Errorf("lock runs: %w", err)
	}
	return nil
}
