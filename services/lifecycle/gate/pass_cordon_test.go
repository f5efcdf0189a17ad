package gate_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/gate"
)

// Scenario: a release gives a resource up on a node that a finding has cordoned, and finds it cordoned; before it
// commits the finding ends. The cordon passes to the release, since what it left is still there.
func TestACordonThatEndsMeanwhilePassesToTheRelease(t *testing.T) {
	const finding = "finding:one"
	k := newKit(t)
	node := k.node()
	k.tx(func(ctx context.Context, tx pgx.Tx) error { return gate.CordonFor(ctx, tx, node, "occupied", finding) })
	release, err := k.pool.Begin(k.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer release.Rollback(k.ctx) // it is committed below
	by, err := gate.CordonUnlessIs(k.ctx, release, node, "left", gate.Release)
	if err != nil || by != finding {
		t.Fatalf("cordoned by %q: %v", by, err)
	}
	if _, err := release.Exec(k.ctx, `INSERT INTO lifecycle.resource_claim
		(id, workspace_id, tenant_id, run_id, step, kind, scope, deterministic_name, epoch, node_id, orphaned_at)
		VALUES ($1, $1, $1, $1, 1, 'storage', 'node_local', 'left', 1, $2, mesh.clock())`, ids.New(), node); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		ended <- pg.InTx(k.ctx, k.pool, func(ctx context.Context, tx pgx.Tx) error {
			return gate.EndCordonOf(ctx, tx, node, finding)
		})
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting int
		err := k.pool.QueryRow(k.ctx, `SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE NOT l.granted AND a.datname = current_database()`).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("no transaction waits")
		}
		return err
	})
	if err := release.Commit(k.ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if g := k.get(node); !g.Cordoned || g.CordonedBy != gate.Release {
		t.Errorf("the node is cordoned: %t, by %q; want by %q", g.Cordoned, g.CordonedBy, gate.Release)
	}
}
