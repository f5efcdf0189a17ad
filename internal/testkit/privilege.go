package testkit

import (
	"context"
	"errors"
	"fmt"

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
