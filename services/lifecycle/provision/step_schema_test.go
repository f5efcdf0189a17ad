package provision

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
	steps := NewSteps(StepDeps{Workloads: pool, Secret: []byte("a secret of thirty-two characters")})
	var group errgroup.Group
	names := make([]string, spaces)
	for i := range spaces {
		id := ids.New()
		names[i] = schema.Name("acme", fmt.Sprintf("space%d", i), id)
		group.Go(func() error {
			for round := range int64(rounds) {
				env := &saga.Env{Epoch: 1}
				env.WorkspaceID, env.OpSeq = id, 2*round
				if _, err := steps.migrateTenant(ctx, env, names[i]); err != nil {
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
	steps := NewSteps(StepDeps{Workloads: pool, Secret: []byte("a secret of thirty-two characters")})
	id := ids.New()
	schema := schema.Name("acme", "demo", id)
	made := make(chan error, 1)
	go func() {
		env := &saga.Env{Epoch: 1}
		env.WorkspaceID, env.OpSeq = id, 1
		_, err := steps.migrateTenant(ctx, env, schema)
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

// TestASchemaKnowsWhichRunMadeIt: a driver that dies after it has made a schema, and before that is recorded, leaves
// the note of its run on the schema, in the transaction that made it. Another run's undo finds that note and drops
// nothing.
func TestASchemaKnowsWhichRunMadeIt(t *testing.T) {
	testkit.IO(t)
	pool, err := pgxpool.New(testkit.Context(t), testkit.DB(t).WorkloadURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	steps := NewSteps(StepDeps{Workloads: pool, Secret: []byte("a secret of thirty-two characters")})
	id, first, second := ids.New(), ids.New(), ids.New()
	name := schema.Name("x"+id[len(id)-12:], "demo", id) // roles belong to the whole server
	ran := func(run string, epoch, op int64) *saga.Env {
		return &saga.Env{RunID: run, WorkspaceID: id, Epoch: epoch, OpSeq: op}
	}
	if _, err := steps.migrateTenant(t.Context(), ran(first, 1, 1), name); err != nil {
		t.Fatal(err)
	}
	if _, err := steps.migrateTenant(t.Context(), ran(second, 2, 2), name); err != nil {
		t.Fatal(err)
	}
	undo := func(run string, epoch, op int64) (bool, error) {
		w := schema.WriterOf(ran(run, epoch, op))
		return schema.DropOwn(t.Context(), pool, name, w, func(note string) bool { return note == w.Note() })
	}
	kept, err := undo(second, 2, 3)
	if err != nil || !kept {
		t.Fatalf("a schema of another run was kept: %v, %v", kept, err)
	}
	if role, login, schema := hasRole(t, pool, name); !role || login || !schema {
		t.Fatalf("the role stands: %v and may log in: %v, the schema: %v", role, login, schema)
	}
	// The schema's name is taken for as long as the schema exists.
	if holder, err := schema.HolderOf(t.Context(), pool, name); err != nil || holder != id {
		t.Fatalf("%q has the name: %v", holder, err)
	}
	var dropped bool
	err = pool.QueryRow(t.Context(), `SELECT dropped FROM gpuaas_fence.schema WHERE name = $1`, name).Scan(&dropped)
	if err != nil || dropped {
		t.Errorf("its fence counts it as dropped: %v, %v", dropped, err)
	}
	if err := schema.DropFenced(t.Context(), pool, name, schema.WriterOf(ran(second, 2, 4))); err != nil {
		t.Fatal(err)
	}
	if role, _, schema := hasRole(t, pool, name); role || schema {
		t.Fatalf("the role stands: %v, the schema: %v", role, schema)
	}
	// A run drops the schema that it made. Where only the role existed before, the role loses its login and is kept.
	quoted := pgx.Identifier{name}.Sanitize()
	if _, err := pool.Exec(t.Context(), `CREATE ROLE `+quoted+` LOGIN`); err != nil {
		t.Fatal(err)
	}
	if _, err := steps.migrateTenant(t.Context(), ran(second, 2, 5), name); err != nil {
		t.Fatal(err)
	}
	kept, err = undo(second, 2, 6)
	if role, login, schema := hasRole(t, pool, name); err != nil || kept || !role || login || schema {
		t.Fatalf("kept: %v, %v; the role stands: %v and may log in: %v, the schema: %v", kept, err, role, login, schema)
	}
	// An earlier build left no note: a schema that it made in a later epoch than the first counts as made before the run.
	if _, err := steps.migrateTenant(t.Context(), ran("", 2, 7), name); err != nil {
		t.Fatal(err)
	}
	if kept, err = undo(second, 2, 8); err != nil || !kept {
		t.Fatalf("a schema with no note was kept: %v, %v", kept, err)
	}
}

// hasRole reports whether the role of a name exists and may log in, and whether the schema exists.
func hasRole(t *testing.T, admin *pgxpool.Pool, name string) (role, login, there bool) {
	t.Helper()
	err := admin.QueryRow(testkit.Context(t),
		`SELECT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = $1), EXISTS (SELECT 1 FROM pg_roles
			WHERE rolname = $1 AND rolcanlogin),
		EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)`, name).Scan(&role, &login, &there)
	if err != nil {
		t.Fatal(err)
	}
	return role, login, there
}
