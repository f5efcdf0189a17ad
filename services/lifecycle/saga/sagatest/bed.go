package sagatest

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

// ErrBoom is a failure that a step of a test returns.
var ErrBoom = errors.New("boom")

// Bed is a database with one tenant, a core and the drivers that a test starts.
type Bed struct {
	T      *testing.T
	DB     *testkit.Database
	Core   *saga.Core
	Tenant string
}

// States are the states that the definitions of beds give their workspaces.
func States() saga.WorkspaceStates {
	return saga.WorkspaceStates{
		Running:   commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
		Succeeded: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Failed:    commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
	}
}

// NewBed returns a bed on a database of its own.
func NewBed(t *testing.T, defs ...saga.Definition) *Bed {
	t.Helper()
	return BedOn(t, testkit.DB(t), nil, defs...)
}

// BedOn returns a bed on a database. onPoint is called at every kill point; it may be nil.
func BedOn(t *testing.T, db *testkit.Database, onPoint func(context.Context, string, saga.Place) error,
	defs ...saga.Definition,
) *Bed {
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
	b := &Bed{T: t, DB: db, Core: core, Tenant: ids.New()}
	_, err = pg.Exec(testkit.Context(t), db.Pool(pg.RoleLifecycle), insertTenant, b.Tenant, "t-"+b.Tenant)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Config returns the configuration of a driver whose lease and graces do not end by themselves.
func (b *Bed) Config(owner string) drive.Config {
	return drive.Config{
		// A lease and a grace that a busy machine does not use up; a test that needs their end causes it.
		Owner: owner, Workers: 8, Lease: 20 * time.Second, Heartbeat: 2 * time.Second, Poll: 50 * time.Millisecond,
		CancelGrace: time.Minute, StopGrace: 5 * time.Second, StallSweep: 50 * time.Millisecond,
	}
}

// Drive runs a driver until stop is called or the test ends.
func (b *Bed) Drive(cfg drive.Config) func() {
	b.T.Helper()
	d, err := drive.New(b.Core, cfg)
	if err != nil {
		b.T.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.T.Context()))
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	var once sync.Once
	stop := func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				b.T.Errorf("driver: %v", err)
			}
		})
	}
	b.T.Cleanup(stop)
	return stop
}

// Tx runs fn in a transaction, and tells the core of its end.
func (b *Bed) Tx(fn func(ctx context.Context, tx pgx.Tx) error) error {
	b.T.Helper()
	err := pg.InTx(testkit.Context(b.T), b.DB.Pool(pg.RoleLifecycle), fn)
	b.Core.Committed()
	return err
}

// Exec runs a statement that a test makes up, as the role of lifecycle.
func (b *Bed) Exec(sql string, args ...any) {
	b.T.Helper()
	testkit.Exec(b.DB, pg.RoleLifecycle, sql, args...)
}

// Second returns another replica's core on the same database.
func (b *Bed) Second(defs ...saga.Definition) *Bed {
	b.T.Helper()
	return BedOn(b.T, b.DB, nil, defs...)
}

// Create makes a workspace and starts a run on it; it returns the ids of both.
func (b *Bed) Create(def string) (string, string) {
	b.T.Helper()
	var workspaceID string
	var started saga.Started
	err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		id, err := workspace.Insert(ctx, tx,
			workspace.Draft{TenantID: b.Tenant, Name: "w-" + ids.New(), CreatedBy: "test"})
		if err != nil {
			return err
		}
		workspaceID = id
		started, err = b.Core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: id, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: def, Requester: "test",
			NextEpoch: true,
			Input:     map[string]string{"hello": "world"},
		})
		return err
	})
	if err != nil {
		b.T.Fatal(err)
	}
	return workspaceID, started.RunID
}

// Run returns a run.
func (b *Bed) Run(id string) runs.Run {
	b.T.Helper()
	r, err := runs.Get(testkit.Context(b.T), b.DB.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.T.Fatal(err)
	}
	return r
}

// Workspace returns a workspace.
func (b *Bed) Workspace(id string) workspace.Row {
	b.T.Helper()
	w, err := workspace.Get(testkit.Context(b.T), b.DB.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.T.Fatal(err)
	}
	return w
}

// Timeline returns the attempts of a run.
func (b *Bed) Timeline(id string) []runs.Attempt {
	b.T.Helper()
	list, err := runs.Timeline(testkit.Context(b.T), b.DB.Pool(pg.RoleLifecycle), id)
	if err != nil {
		b.T.Fatal(err)
	}
	return list
}

// Await waits until the run is in one of the states, within a time or as long as a busy machine may take.
func (b *Bed) Await(id string, within time.Duration, want ...string) runs.Run {
	b.T.Helper()
	var last runs.Run
	testkit.Eventually(b.T, max(within, testkit.Patience), func() error {
		last = b.Run(id)
		if slices.Contains(want, last.State) {
			return nil
		}
		return fmt.Errorf("run is %s at step %d (%s), phase %s: %s", last.State, last.Step, last.StepName(), last.Phase,
			last.WhyWaiting)
	})
	return last
}

// Fast returns a policy whose waits are short.
func Fast() saga.RetryPolicy {
	return saga.RetryPolicy{Attempts: 3, First: 5 * time.Millisecond, Max: 20 * time.Millisecond}
}

// Noop does nothing, and succeeds.
func Noop(context.Context, *saga.Env) (saga.Outcome, error) { return saga.Done(nil), nil }

// PureSteps returns steps that do nothing.
func PureSteps(names ...string) []saga.Step {
	steps := make([]saga.Step, len(names))
	for i, n := range names {
		steps[i] = saga.Step{Name: n, Class: saga.Pure, Do: Noop, Retry: Fast(), UndoRetry: Fast()}
	}
	return steps
}
