package static_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/placement"
	"github.com/gpuaas/mesh/services/lifecycle/placement/placementtest"
	"github.com/gpuaas/mesh/services/lifecycle/placement/static"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestConformance(t *testing.T) {
	testkit.IO(t)
	placementtest.Conform(t, static.New(testkit.DB(t).Pool(pg.RoleLifecycle)), ids.New())
}

// TestEndBesideALaunch checks that an end which meets a launch that has not committed yet ends what that launch takes.
func TestEndBesideALaunch(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	pool := db.Pool(pg.RoleLifecycle)
	driver := static.New(pool)
	workspace := ids.New()
	launch, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = launch.Rollback(context.WithoutCancel(ctx)) }()
	_, err = launch.Exec(ctx, `INSERT INTO lifecycle.static_placement (workspace_id, epoch, instance_id, node_id)
		VALUES ($1, 1, $2, $3)`,
		workspace, ids.New(), ids.New())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- driver.End(ctx, workspace, 1) }()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting bool
		err := db.OwnerPool().QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE NOT l.granted AND l.locktype = 'transactionid' AND a.datname = current_database())`).Scan(&waiting)
		if err == nil && !waiting {
			err = errors.New("the end does not wait for the launch")
		}
		return err
	})
	if err := launch.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	list, err := driver.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 1 || list[0].WorkspaceID != workspace || list[0].EndedAt.IsZero() {
		t.Errorf("after the end: %+v", list)
	}
}

// TestALaunchAsksForPermissionWithItsOnlyConnection checks that a launch needs one connection at a time: its permission
// reads the same database, by the same pool.
func TestALaunchAsksForPermissionWithItsOnlyConnection(t *testing.T) {
	testkit.IO(t)
	ctx, db := testkit.Context(t), testkit.DB(t)
	config := db.Pool(pg.RoleLifecycle).Config()
	config.MaxConns, config.MinConns = 1, 0
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	ctx, cancel := context.WithTimeout(ctx, testkit.Patience)
	defer cancel()
	asked := 0
	request := placement.LaunchRequest{
		WorkspaceID: ids.New(), Epoch: 1, InstanceID: ids.New(), NodeID: ids.New(),
		Permit: func(ctx context.Context) error {
			asked++
			return pool.Ping(ctx)
		},
	}
	if _, err := static.New(pool).Launch(ctx, request); err != nil || asked != 1 {
		t.Errorf("launched with %v after %d questions", err, asked)
	}
}
