// Package policystore reads and writes mesh.policy, the table of policy values that differ from their default.
//
// It stands apart from package policy so that whoever needs only the keys does not link the database driver. It judges no value: policy.Set's
// Validate is asked before Put, and a stored value outside the bounds is ignored by whoever reads it.
package policystore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/gpuaas/mesh/internal/policy"
)

// Querier is a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Load answers the function with which a policy.Source reads the table. Every service's role may.
func Load(db Querier) policy.LoadFunc {
	return func(ctx context.Context) (map[string]string, error) {
		rows, err := List(ctx, db)
		if err != nil {
			return nil, err
		}
		out := make(map[string]string, len(rows))
		for _, r := range rows {
			out[r.Key] = r.Value
		}
		return out, nil
	}
}

// Row is one stored value and who stored it.
type Row struct {
	Key       string
	Value     string
	UpdatedAt time.Time
	UpdatedBy string
	Reason    string
}

// List answers the stored values in the order of their keys.
func List(ctx context.Context, db Querier) ([]Row, error) {
	rows, err := db.Query(ctx, `SELECT key, value, updated_at, updated_by, reason FROM mesh.policy ORDER BY key`)
	if err != nil {
		return nil, fmt.Errorf("list policy: %w", err)
	}
	out, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Row])
	if err != nil {
		return nil, fmt.Errorf("list policy: %w", err)
	}
	return out, nil
}

// Put stores a value. Recovery's role and the owner may. The caller has validated it and writes the event in the same transaction.
func Put(ctx context.Context, db Querier, key, value, by, reason string) error {
	const upsert = `INSERT INTO mesh.policy AS p (key, value, updated_at, updated_by, reason) VALUES ($1, $2, mesh.clock(), $3, $4)
ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value, updated_at = EXCLUDED.updated_at, updated_by = EXCLUDED.updated_by, reason = EXCLUDED.reason`
	if _, err := db.Exec(ctx, upsert, key, value, by, reason); err != nil {
		return fmt.Errorf("store policy: %w", err)
	}
	return nil
}
