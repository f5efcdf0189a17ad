package saga_test

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pg/migrations"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestStandingFollowsTheState takes workspaces of the build before through the migration: the column standing, which
// counts against its tenant's limits, follows its state, in every session; the rows count as written by the product;
// and a change between states with the same value writes to no index.
func TestStandingFollowsTheState(t *testing.T) {
	testkit.IO(t)
	ctx, d := testkit.Context(t), testkit.DB(t)
	sql, err := fs.ReadFile(migrations.FS, "00171_lifecycle_standing.sql")
	if err != nil {
		t.Fatal(err)
	}
	up, down, _ := strings.Cut(string(sql), "-- +goose Down")
	migrate := func(sql string) {
		t.Helper()
		for i, part := range strings.Split(sql, "-- +goose Statement") {
			list := []string{part}
			if i%2 == 0 {
				list = strings.SplitAfter(part, ";\n")
			}
			for _, s := range list {
				s = strings.TrimPrefix(strings.TrimPrefix(s, "Begin"), "End")
				if _, err := d.OwnerPool().Exec(ctx, s); err != nil {
					t.Fatalf("%s: %v", s, err)
				}
			}
		}
	}
	migrate(down)
	product := d.Pool(pg.RoleLifecycle)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := product.Exec(ctx, sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	tenant, want := ids.New(), map[string]int{"active": 2, "recreating": 2, "failed": 1, "decommissioned": 0}
	exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, 'acme')`, tenant)
	for state := range want {
		exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state) VALUES ($1, $2, $3, $3)`, ids.New(), tenant, state)
	}
	migrate(up)
	check := func(when string) {
		t.Helper()
		rows, err := product.Query(ctx, `SELECT w.state, w.standing::int, lifecycle.seal_fits(w) FROM lifecycle.workspace w`)
		if err != nil {
			t.Fatal(err)
		}
		var state string
		var standing int
		var fits bool
		if _, err := pgx.ForEachRow(rows, []any{&state, &standing, &fits}, func() error {
			if standing != want[state] || !fits {
				return fmt.Errorf("%s, a workspace that is %s stands at %d, its seal fits: %t", when, state, standing, fits)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	check("migrated")
	exec(`UPDATE lifecycle.workspace SET state = 'decommissioned' WHERE name = 'active'`)
	exec(`UPDATE lifecycle.workspace SET state = 'active', standing = 0 WHERE name = 'failed'`)
	check("changed")
	// The name of a decommissioned workspace is free, that of a failed one is not.
	exec(`INSERT INTO lifecycle.workspace (id, tenant_id, name, state) VALUES ($1, $2, 'active', 'failed')`, ids.New(),
		tenant)
	_, err = product.Exec(ctx, `INSERT INTO lifecycle.workspace (id, tenant_id, name, state)
		VALUES ($1, $2, 'active', 'provisioning')`, ids.New(), tenant)
	if !pg.IsUnique(err, "workspace_name") {
		t.Errorf("a name that is taken was given again: %v", err)
	}
	check("inserted")
	if n, err := evidence(ctx, product); n != 0 || err != nil {
		t.Errorf("%d changes count as made by hand, %v", n, err)
	}
	err = pg.InTx(ctx, product, func(ctx context.Context, tx pgx.Tx) error {
		for _, state := range []string{"active", "recreating", "active"} {
			if _, err := tx.Exec(ctx, `UPDATE lifecycle.workspace SET state = $1 WHERE name = 'recreating'`, state); err != nil {
				return err
			}
		}
		var n int
		err := tx.QueryRow(ctx, `SELECT pg_stat_get_xact_tuples_hot_updated('lifecycle.workspace'::regclass)::int`).Scan(&n)
		if err == nil && n != 3 {
			t.Errorf("%d of 3 changes of the state stayed on their page", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func evidence(ctx context.Context, q pg.Querier) (int, error) {
	var n int
	err := q.QueryRow(ctx, `SELECT count(*) FROM lifecycle.row_evidence`).Scan(&n)
	return n, err
}
