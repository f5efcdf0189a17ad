package saga_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// bed is a database with one tenant, a core and the drivers a test starts.
type bed struct {
	t      *testing.T
	db     *testkit.Database
	core   *saga.Core
	tenant string
}

func states() saga.WorkspaceStates {
	return saga.WorkspaceStates{
		Running:   commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	}
}

func newBed(t *testing.T, defs ...saga.Definition) *bed {
	t.Helper()
	return bedOn(t, testkit.DB(t), nil, defs...)
}

func bedOn(t *testing.T, db *testkit.Database, onPoint func(context.Context, string, saga.Place) error,
	defs ...saga.Definition,
) *bed {
	t.Helper()
	registry, err := saga.NewRegistry(defs...)
	if err != nil {
		t.Fatal(err)
	}
	core, err := saga.New(saga.Deps{
		DB: db.Pool(pg.RoleLifecycle), Registry: registry, Logger: testkit.Logger(t),
		OnPoint: onPoint,
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, db: db, core: core, tenant: ids.New()}
	b.exec(`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`, b.tenant, "t-"+b.tenant)
	return b
}

func (b *bed) exec(sql string, args ...any) {
	b.t.Helper()
	if _, err := b.db.Pool(pg.RoleLifecycle).Exec(testkit.Context(b.t), sql, args...); err != nil {
		b.t.Fatalf("%s: %v", sql, err)
	}
}

func (b *bed) config(owner string) drive.Config {
	return drive.Config{
		// A lease and a grace that a busy machine does not use up; a test that needs their end causes it.
		Owner: owner, Workers: 8, Lease: 20 * time.Second, Heartbeat: 2 * time.Second, Poll: 50 * time.Millisecond,
		CancelGrace: time.Minute, StopGrace: 5 * time.Second, StallSweep: 50 * time.Millisecond,
	}
}

// drive runs a driver until stop is called or the test ends.
func (b *bed) drive(cfg drive.Config) func() {
	b.t.Helper()
	d, err := drive.New(b.core, cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				b.t.Errorf("driver: %v", err)
			}
		})
	}
	b.t.Cleanup(stop)
	return stop
}

func (b *bed) tx(fn func(ctx context.Context, tx pgx.Tx) error) error {
	b.t.Helper()
	err := pg.InTx(testkit.Context(b.t), b.db.Pool(pg.RoleLifecycle), fn)
	b.core.Committed()
	return err
}

// create makes a workspace and starts a run on it; it returns the ids of both.
func (b *bed) create(def string) (string, string) {
	b.t.Helper()
	var workspaceID string
	var started saga.Started
	err := b.tx(func(ctx context.Context, tx pgx.Tx) error {
		id, err := workspace.Insert(ctx, tx,
			workspace.Draft{TenantID: b.tenant, Name: "w-" + ids.New(), CreatedBy: "test"})
		if err != nil {
			return err
		}
		workspaceID = id
		started, err = b.core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: id, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: def, Requester: "test",
			NextEpoch: true,
			Input:     map[string]string{"hello": "world"},
		})
		return err
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return workspaceID, started.RunID
}

func (b *bed) run(id string) runs.Run {
	b.t.Helper()
	r, err := runs.Get(testkit.Context(b.t), b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

func (b *bed) workspace(id string) workspace.Row {
	b.t.Helper()
	w, err := workspace.Get(testkit.Context(b.t), b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return w
}

func (b *bed) timeline(id string) []runs.Attempt {
	b.t.Helper()
	list, err := runs.Timeline(testkit.Context(b.t), b.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return list
}

// await waits until the run is in one of the states, within a time or as long as a busy machine may take.
func (b *bed) await(id string, within time.Duration, want ...string) runs.Run {
	b.t.Helper()
	var last runs.Run
	testkit.Eventually(b.t, max(within, testkit.Patience), func() error {
		last = b.run(id)
		if slices.Contains(want, last.State) {
			return nil
		}
		return fmt.Errorf("run is %s at step %d (%s), phase %s: %s", last.State, last.Step, last.StepName(), last.Phase,
			last.WhyWaiting)
	})
	return last
}

var fast = saga.RetryPolicy{Attempts: 3, First: 5 * time.Millisecond, Max: 20 * time.Millisecond}

func noop(context.Context, *saga.Env) (saga.Outcome, error) { return saga.Done(nil), nil }

func pureSteps(names ...string) []saga.Step {
	steps := make([]saga.Step, len(names))
	for i, n := range names {
		steps[i] = saga.Step{Name: n, Class: saga.Pure, Do: noop, Retry: fast, UndoRetry: fast}
	}
	return steps
}

var errBoom = errors.New("boom")
