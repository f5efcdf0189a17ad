package operation

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/schema"
)

// TestSchemasAreMadeAndDroppedAtOnce: the roles of all workspaces are granted the same database, and give the grant
// back when they are dropped. Postgres refuses a transaction whose grant follows another's that was not committed when
// it began.
func TestSchemasAreMadeAndDroppedAtOnce(t *testing.T) {
	testkit.IO(t)
	const spaces, rounds = 8, 6
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	cfg, err := pgxpool.ParseConfig(db.WorkloadURL())
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = spaces + 1
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	steps := provision.NewSteps(provision.StepDeps{Workloads: pool, Secret: []byte("a secret of thirty-two characters")})
	var group errgroup.Group
	names := make([]string, spaces)
	for i := range spaces {
		id := ids.New()
		names[i] = schema.Name("acme", fmt.Sprintf("space%d", i), id)
		group.Go(func() error {
			for round := range int64(rounds) {
				env := &saga.Env{Epoch: 1}
				env.WorkspaceID, env.OpSeq = id, 2*round
				if _, err := steps.MigrateTenant(ctx, env, names[i]); err != nil {
					return fmt.Errorf("make %s, round %d: %w", names[i], round, err)
				}
				if round == rounds-1 {
					break
				}
				w := schema.WriterOf(env)
				w.OpSeq++
				if err := schema.DropFenced(ctx, pool, names[i], w); err != nil {
					return fmt.Errorf("drop %s, round %d: %w", names[i], round, err)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		var may bool
		if err := pool.QueryRow(ctx, `SELECT has_database_privilege($1, current_database(), 'CONNECT')`,
			name).Scan(&may); err != nil || !may {
			t.Errorf("%s may connect: %v, %v", name, may, err)
		}
	}
}

// TestASchemaOutlastsAnotherGrant: a grant on the same database by a client that does not take the lock of grants, such
// as the provisioning of the database, makes no schema fail.
func TestASchemaOutlastsAnotherGrant(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	ctx := testkit.Context(t)
	pool, err := pgxpool.New(ctx, db.WorkloadURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	tx, err := pool.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) }) // or the pool would wait for it
	name := pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize()
	if _, err := tx.Exec(ctx, `GRANT CONNECT ON DATABASE `+name+` TO current_user`); err != nil {
		t.Fatal(err)
	}
	steps := provision.NewSteps(provision.StepDeps{Workloads: pool, Secret: []byte("a secret of thirty-two characters")})
	id := ids.New()
	schema := schema.Name("acme", "demo", id)
	made := make(chan error, 1)
	go func() {
		env := &saga.Env{Epoch: 1}
		env.WorkspaceID, env.OpSeq = id, 1
		_, err := steps.MigrateTenant(ctx, env, schema)
		made <- err
	}()
	testkit.Eventually(t, testkit.Patience, func() error {
		var waiting string
		err := pool.QueryRow(ctx, `SELECT coalesce(string_agg(query, ';'), '') FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waiting)
		if err == nil && !strings.Contains(waiting, "GRANT CONNECT") {
			err = fmt.Errorf("%q waits", waiting)
		}
		return err
	})
	if err := tx.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-made; err != nil {
		t.Fatalf("the schema beside another grant: %v (retryable %v)", err, pg.IsRetryable(err))
	}
}
