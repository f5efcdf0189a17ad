package schema

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// SecretKeyUse counts the rows of one kind that need a key of workload secrets.
type SecretKeyUse struct {
	Key  string `db:"key"` // its id; "(none)" for rows that are sealed under no key yet
	Rows int64  `db:"n"`
	What string `db:"what"`
}

// SecretKeyUses returns which keys of workload secrets the rows need, by key and kind of row. It returns no rows if the
// database is older than sealed values.
func SecretKeyUses(ctx context.Context, ownerURL string) ([]SecretKeyUse, error) {
	pool, err := ownerPool(ctx, ownerURL)
	if err != nil {
		return nil, fmt.Errorf("count rows by key: %w", err)
	}
	defer pool.Close()
	var known bool
	if err := pool.QueryRow(ctx, "SELECT to_regclass('lifecycle.secret_key_use') IS NOT NULL").Scan(&known); err != nil ||
		!known {
		return nil, err
	}
	rows, err := pool.Query(ctx, `SELECT replace(k, '!', '(none)') AS key, sum(u.n)::bigint AS n, u.what
		FROM lifecycle.secret_key_use u, string_to_table(u.keys, ',') AS k
		WHERE k <> '' GROUP BY k, u.what ORDER BY k, u.what`)
	if err != nil {
		return nil, fmt.Errorf("count rows by key: %w", err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowToStructByName[SecretKeyUse])
	if err != nil {
		return nil, fmt.Errorf("count rows by key: %w", err)
	}
	return out, nil
}
