// Package policystore reads and writes mesh.policy, the table of policy values that differ from their default.
//
// It is separate from package policy so that a program that needs only the keys does not link the database driver. It
// validates no value: callers call policy.Set's Validate before Put, and policy.NewSet ignores a stored value outside
// the bounds.
package policystore

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
)

// everyRole may read the table.
var everyRole = []string{pg.RoleOwner, pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}

var (
	listValues = pg.DefineShared(everyRole, "policy.list",
		`SELECT `+pg.Columns[Row]("p")+` FROM mesh.policy p ORDER BY p.key`)

	putValue = pg.DefineShared([]string{pg.RoleOwner, pg.RoleRecovery}, "policy.put", `
		INSERT INTO mesh.policy AS p (key, value, updated_at, updated_by, reason) VALUES ($1, $2, mesh.clock(), $3, $4)
		ON CONFLICT (key) DO UPDATE
			SET value = EXCLUDED.value, updated_at = EXCLUDED.updated_at, updated_by = EXCLUDED.updated_by,
			reason = EXCLUDED.reason`)
)

// Load returns the function with which a policy.Source reads the table. Every service's role may.
func Load(db pg.Querier) policy.LoadFunc {
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
	Key       string    `db:"key"`
	Value     string    `db:"value"`
	UpdatedAt time.Time `db:"updated_at"`
	UpdatedBy string    `db:"updated_by"`
	Reason    string    `db:"reason"`
}

// List returns the stored values in the order of their keys.
func List(ctx context.Context, db pg.Querier) ([]Row, error) {
	out, err := pg.All[Row](ctx, db, listValues)
	if err != nil {
		return nil, fmt.Errorf("list policy: %w", err)
	}
	return out, nil
}

// Put stores a value. Recovery's role and the owner may. The caller has validated it and writes the event in the same
// transaction.
func Put(ctx context.Context, db pg.Querier, key, value, by, reason string) error {
	if _, err := pg.Exec(ctx, db, putValue, key, value, by, reason); err != nil {
		return fmt.Errorf("store policy: %w", err)
	}
	return nil
}
