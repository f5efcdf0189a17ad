package testkit

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/pg"
)

// IsPrivilege reports whether a role lacked the right to do what it tried, row policies included.
func IsPrivilege(err error) bool {
	failed, ok := errors.AsType[*pgconn.PgError](err)
	return ok && failed.Code == "42501" // insufficient_privilege
}

// RaiseEra sets the era one higher and returns it, as the first half of a declared restore does.
func RaiseEra(ctx context.Context, owner pg.Querier, reason string) (int64, error) {
	var era int64
	if err := owner.QueryRow(ctx, `UPDATE mesh.era SET era = era + 1, raised_at = clock_timestamp(),
		raised_by = session_user, reason = $1 RETURNING era`, reason).Scan(&era); err != nil {
		return 0, fmt.Errorf("raise era: %w", err)
	}
	return era, nil
}

// Clock returns mesh.clock(), and what is to be added to time.Now() to get it.
func Clock(ctx context.Context, q pg.Querier) (time.Time, time.Duration, error) {
	sent := time.Now()
	var now time.Time
	if err := q.QueryRow(ctx, "SELECT mesh.clock()").Scan(&now); err != nil {
		return time.Time{}, 0, fmt.Errorf("read mesh clock: %w", err)
	}
	return now, now.Sub(sent.Add(time.Since(sent) / 2)), nil
}
