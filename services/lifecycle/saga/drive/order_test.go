package drive_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
)

// locked returns which rows of a run another transaction has locked.
func (b *bed) locked(ctx context.Context, env *saga.Env) (string, error) {
	free := func(sql, id string) (bool, error) {
		tx, err := b.DB.Pool(pg.RoleLifecycle).Begin(ctx)
		if err != nil {
			return false, err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		_, err = tx.Exec(ctx, sql, id)
		if failure, ok := errors.AsType[*pgconn.PgError](err); ok && failure.Code == "55P03" {
			return false, nil
		}
		return true, err
	}
	run, err := free(`SELECT FROM lifecycle.saga_run WHERE id = $1 FOR NO KEY UPDATE NOWAIT`, env.RunID)
	if err != nil {
		return "", err
	}
	workspace, err := free(`SELECT FROM lifecycle.workspace WHERE id = $1 FOR NO KEY UPDATE NOWAIT`, env.WorkspaceID)
	return fmt.Sprintf("run %t, workspace %t", !run, !workspace), err
}

// TestOrderOfLocksOfAStuckRun checks that the rows which the definition of a stuck run locks before the run are locked
// before it.
func TestOrderOfLocksOfAStuckRun(t *testing.T) {
	testkit.IO(t)
	var rec sagatest.Record
	var b *bed
	var of saga.Env
	read := func(ctx context.Context, what, workspaceID string) error {
		held, err := b.locked(ctx, &saga.Env{RunID: of.RunID, WorkspaceID: workspaceID})
		rec.Add("%s: %s", what, held)
		return err
	}
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(_ context.Context, env *saga.Env) (saga.Outcome, error) {
		of = *env
		return saga.Outcome{}, saga.Fail(0, commonv1.Reason_REASON_LAUNCH_FAILED, "", nil)
	}
	b = newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: steps, States: sagatest.States(), Sticks: true,
		BeforeStuck: func(ctx context.Context, _ pgx.Tx, workspaceID string) error {
			return read(ctx, "before", workspaceID)
		},
		OnStuck: func(ctx context.Context, _ pgx.Tx, workspaceID string, _ *saga.StepError) error {
			return read(ctx, "stuck", workspaceID)
		},
	})
	cfg := b.Config("a")
	cfg.Heartbeat, cfg.Lease = 5*time.Minute, 15*time.Minute // nothing but the end of the run locks it
	b.Drive(cfg)
	_, id := b.Create("toy")
	b.Await(id, time.Minute, "stuck")
	want := []string{"before: run false, workspace false", "stuck: run true, workspace true"}
	if got := rec.All(); !slices.Equal(got, want) {
		t.Errorf("locks = %q, want %q", got, want)
	}
}

// TestOrderOfLocks checks that the rows which a step locks before its run are locked before it, and that its own rows
// come after its run and its workspace.
func TestOrderOfLocks(t *testing.T) {
	testkit.IO(t)
	var rec sagatest.Record
	var b *bed
	read := func(what string, env *saga.Env) saga.TxFunc {
		return func(ctx context.Context, _ pgx.Tx) error {
			held, err := b.locked(ctx, env)
			rec.Add("%s: %s", what, held)
			return err
		}
	}
	steps := sagatest.PureSteps("one", "two")
	steps[0].Do = func(ctx context.Context, env *saga.Env) (saga.Outcome, error) {
		if err := env.TxAfter(ctx, read("before", env), read("within", env)); err != nil {
			return saga.Outcome{}, err
		}
		return saga.Done(nil, read("rows", env)).After(read("before rows", env)), nil
	}
	b = newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Heartbeat, cfg.Lease = 5*time.Minute, 15*time.Minute // nothing but the step locks the run
	b.Drive(cfg)
	_, id := b.Create("toy")
	b.Await(id, time.Minute, "succeeded")
	want := []string{
		"before: run false, workspace false", "within: run true, workspace false",
		"before rows: run false, workspace false", "rows: run true, workspace true",
	}
	if got := rec.All(); !slices.Equal(got, want) {
		t.Errorf("locks = %q, want %q", got, want)
	}
}
