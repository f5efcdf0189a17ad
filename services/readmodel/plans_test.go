package readmodel_test

import (
	"context"
	"testing"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// TestListsAreNotPlannedAnewForEachRequest: planning the join of a list costs several times what running it does.
func TestListsAreNotPlannedAnewForEachRequest(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool, err := pg.Open(ctx, pg.Config{
		URL: db.URL(pg.RoleReadmodel), ApplicationName: "test", MaxConns: 1, Settings: readmodel.PoolSettings(),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	reader := view.NewReader(pool)
	for range 10 {
		err := reader.Read(ctx, list.All(), func(ctx context.Context, s *view.Snapshot) error {
			_, _, err := s.Workspaces(ctx, view.WorkspaceFilter{}, list.Page{Size: 8})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	var custom, generic int
	err = pool.QueryRow(ctx, `SELECT sum(custom_plans), sum(generic_plans) FROM pg_prepared_statements
		WHERE statement LIKE '/* view.list_workspaces%'`).Scan(&custom, &generic)
	if err != nil {
		t.Fatal(err)
	}
	if custom != 0 || generic != 10 {
		t.Errorf("ten lists were planned anew %d times and ran with a plan that was there %d times", custom, generic)
	}
}
