package pg

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg/migrations"
)

// ErrNotMigrated is returned if the database lacks migrations that this binary needs.
var ErrNotMigrated = errors.New("the database lacks migrations of this version: run `gpuaas migrate`")

// CheckMigrated returns ErrNotMigrated, with the missing files, until the database has every migration of this binary.
// Any service role may call it; it is meant for readiness checks. A database that is ahead is fine.
func CheckMigrated(ctx context.Context, q Querier) error {
	rows, err := q.Query(ctx, "SELECT DISTINCT version_id FROM "+migrations.Table+" WHERE is_applied")
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	have, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	files, err := migrations.List()
	if err != nil {
		return err
	}
	var missing []string
	for _, f := range files {
		if !slices.Contains(have, f.Version) {
			missing = append(missing, f.Name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: %s", ErrNotMigrated, strings.Join(missing, ", "))
	}
	return nil
}
