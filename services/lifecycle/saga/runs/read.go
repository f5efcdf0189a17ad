package runs

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Get reads one run. A missing one is pgx.ErrNoRows.
func Get(ctx context.Context, q pg.Querier, id string) (Run, error) {
	r, err := pg.One[Run](ctx, q, runByID, id)
	if err != nil {
		return Run{}, fmt.Errorf("read run %s: %w", id, err)
	}
	return r, nil
}

// Live reads the run that owns a workspace now, and returns false if there is none.
func Live(ctx context.Context, q pg.Querier, workspaceID string) (Run, bool, error) {
	r, err := pg.One[Run](ctx, q, liveRun, workspaceID)
	if pg.IsNoRows(err) {
		return Run{}, false, nil
	}
	if err != nil {
		return Run{}, false, fmt.Errorf("read live run of workspace %s: %w", workspaceID, err)
	}
	return r, true, nil
}

// Timeline reads every attempt of a run in the order they began.
func Timeline(ctx context.Context, q pg.Querier, runID string) ([]Attempt, error) {
	// Read the open attempt first: an attempt that gets its row meanwhile is then read twice, and one that is closed
	// meanwhile at least once.
	open, err := pg.All[Run](ctx, q, openOfRun, runID)
	if err != nil {
		return nil, fmt.Errorf("read timeline of run %s: %w", runID, err)
	}
	out, err := pg.All[Attempt](ctx, q, timeline, runID)
	if err != nil {
		return nil, fmt.Errorf("read timeline of run %s: %w", runID, err)
	}
	for i := range open {
		a := Open(&open[i])
		if !slices.ContainsFunc(
			out, func(b Attempt) bool { return a.Step == b.Step && a.Dir == b.Dir && a.Attempt == b.Attempt },
		) {
			out = append(out, a)
		}
	}
	return out, nil
}

// ChangeAttempts runs a statement that changes attempts, and returns their rows.
func ChangeAttempts(ctx context.Context, tx pgx.Tx, change *pg.Statement, args ...any) ([]Attempt, error) {
	out, err := pg.All[Attempt](ctx, tx, change, args...)
	if err != nil {
		return nil, fmt.Errorf("change attempts: %w", err)
	}
	return out, nil
}

// LockLive locks the run that owns a workspace now, if there is one. A caller that locks the workspace or its
// allocation afterwards calls it first, to keep the order of locks.
func LockLive(ctx context.Context, tx pgx.Tx, workspaceID string) error {
	if _, err := pg.Exec(ctx, tx, lockLiveRun, workspaceID); err != nil {
		return fmt.Errorf("lock live run of workspace %s: %w", workspaceID, err)
	}
	return nil
}
