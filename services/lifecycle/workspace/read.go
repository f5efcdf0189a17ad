package workspace

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
)

// Announce appends the event of a workspace's row as it is in tx, and returns the row and the position token.
// A caller that changes a column of workspace raises its version in the same UPDATE and calls Announce before
// the commit.
func Announce(ctx context.Context, tx pgx.Tx, workspaceID string) (Row, string, error) {
	w, err := Get(ctx, tx, workspaceID)
	if err != nil {
		return Row{}, "", err
	}
	e, err := w.Event()
	if err != nil {
		return Row{}, "", err
	}
	pos, err := events.Append(ctx, tx, e)
	return w, pos, err
}

// Get reads one workspace. A missing one is pgx.ErrNoRows.
func Get(ctx context.Context, q pg.Querier, id string) (Row, error) {
	w, err := pg.One[Row](ctx, q, workspaceByID, id)
	if err != nil {
		return Row{}, fmt.Errorf("read workspace %s: %w", id, err)
	}
	return w, nil
}
