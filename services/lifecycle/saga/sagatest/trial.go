package sagatest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/drive"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

var insertTenant = pg.Define(pg.RoleLifecycle, "sagatest.insert_tenant",
	`INSERT INTO lifecycle.tenant (id, name) VALUES ($1, $2)`)

const lease = 15 * time.Second

// quick keeps the number of attempts and takes the waits out of a policy.
func quick(p saga.RetryPolicy) saga.RetryPolicy {
	p.First, p.Max = 2*time.Millisecond, 10*time.Millisecond
	if p.Attempts == 0 || p.Attempts > 4 {
		p.Attempts = 4
	}
	return p
}

// trial is one run under one plan.
type trial struct {
	t     *testing.T
	c     Case
	plan  *plan
	core  *saga.Core
	skew  *time.Duration
	ws    string
	run   string
	owner int
}

func (tr *trial) db() pg.Beginner { return tr.c.DB.Pool(pg.RoleLifecycle) }

// begin starts the run and then a driver, which leases it from the queue. If the plan says beside, it starts the driver
// first, so that the start mostly leases the run itself. If the plan has a crash, the driver ends at it, and ends
// starts another one.
func (tr *trial) begin() {
	tr.t.Helper()
	if tr.plan.beside {
		tr.drive(func() {})
		tr.start()
		return
	}
	tr.drive(tr.start)
}

func (tr *trial) start() {
	tr.t.Helper()
	ctx := testkit.Context(tr.t)
	err := pg.InTx(ctx, tr.db(), func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if tr.c.Workspace != nil {
			tr.ws, err = tr.c.Workspace(ctx, tr.core, tx)
		} else {
			tr.ws, err = plainWorkspace(ctx, tx)
		}
		if err != nil {
			return err
		}
		out, err := tr.core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: tr.ws, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: tr.c.Definition.Name,
			Input: tr.c.Input, Requester: "sagatest", NextEpoch: true,
		})
		tr.run = out.RunID
		return err
	})
	if err != nil {
		tr.t.Fatalf("start run: %v", err)
	}
	tr.core.Committed()
}

func plainWorkspace(ctx context.Context, tx pgx.Tx) (string, error) {
	tenant := ids.New()
	if _, err := pg.Exec(ctx, tx, insertTenant, tenant, "t-"+tenant); err != nil {
		return "", fmt.Errorf("insert tenant: %w", err)
	}
	return workspace.Insert(ctx, tx,
		workspace.Draft{TenantID: tenant, Name: "w-" + ids.New(), CreatedBy: "sagatest"})
}

// drive starts a driver with an owner of its own. At the planned crash it ends as a killed process would, and the next
// one finds the lease expired. before is called when the core exists and no driver runs yet.
func (tr *trial) drive(before func()) {
	tr.t.Helper()
	tr.owner++
	registry, err := saga.NewRegistry(tr.plan.wrap(tr.c.Definition, func() *saga.Core { return tr.core }, tr.db()))
	if err != nil {
		tr.t.Fatal(err)
	}
	core, err := saga.New(saga.Deps{
		DB: tr.c.DB.Pool(pg.RoleLifecycle), Registry: registry, Logger: testkit.Logger(tr.t),
		OnPoint: tr.plan.points(),
	})
	if err != nil {
		tr.t.Fatal(err)
	}
	driver, err := drive.New(core, drive.Config{
		Owner: fmt.Sprintf("%s-%d", ids.New(), tr.owner), Workers: 4, Lease: lease, Heartbeat: time.Second,
		Poll: 20 * time.Millisecond, CancelGrace: 2 * time.Second, StopGrace: 2 * time.Second, StallSweep: time.Second,
		LeaseBatch: 1, // while it queries the queue, the other workers are free for runs that are started
	})
	if err != nil {
		tr.t.Fatal(err)
	}
	tr.core = core
	if tr.c.Running != nil {
		tr.c.Running(core)
	}
	before()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tr.t.Context()))
	done := make(chan error, 1)
	go func() { done <- driver.Run(ctx) }()
	stop := func() {
		cancel()
		if err := <-done; err != nil {
			tr.t.Errorf("driver: %v", err)
		}
	}
	if tr.plan.crash == nil || tr.owner > 1 {
		tr.t.Cleanup(stop)
		return
	}
	over := make(chan struct{})
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		select {
		case <-tr.plan.crashed:
			driver.Abandon()
		case <-over:
		}
		stop()
	}()
	tr.t.Cleanup(func() { close(over); <-finished })
}

// ends waits for the run's end and checks the workspace. After a planned crash it first lets the lease expire and
// another driver take over.
func (tr *trial) ends(state string, workspaceState commonv1.WorkspaceState) {
	tr.t.Helper()
	if tr.plan.crash != nil && tr.owner == 1 {
		select {
		case <-tr.plan.crashed:
		case <-time.After(tr.c.Timeout):
			tr.t.Fatalf("the run did not come to %s", tr.plan.crash)
		}
		*tr.skew += lease + time.Second
		testkit.SetClockOffset(tr.c.DB, *tr.skew)
		tr.drive(func() {})
	}
	pool := tr.c.DB.Pool(pg.RoleLifecycle)
	var run runs.Run
	testkit.Eventually(tr.t, tr.c.Timeout, func() error {
		var err error
		if run, err = runs.Get(testkit.Context(tr.t), pool, tr.run); err != nil {
			return err
		}
		if run.State != state {
			if run.Live() && run.WhyWaiting == "" {
				tr.t.Errorf("a live run does not say what it waits for: %+v", run)
			}
			return fmt.Errorf("run is %s at %q (%s), not %s: %s; %s %s", run.State, run.StepName(), run.Phase, state,
				run.WhyWaiting, run.StuckReason, run.Error)
		}
		return nil
	})
	w, err := workspace.Get(testkit.Context(tr.t), pool, tr.ws)
	if err != nil {
		tr.t.Fatal(err)
	}
	shown, err := w.Proto()
	if err != nil {
		tr.t.Fatal(err)
	}
	if shown.GetState() != workspaceState {
		tr.t.Errorf("workspace is %s after a run that %s: want %s", w.State, state, workspaceState)
	}
	timeline, err := runs.Timeline(testkit.Context(tr.t), pool, tr.run)
	if err != nil {
		tr.t.Fatal(err)
	}
	for _, a := range timeline {
		if a.State == "running" || a.State == "waiting" {
			tr.t.Errorf("an attempt is still open: %+v", a)
		}
	}
}

// endsClean is ends in failed, with nothing left at the resource.
func (tr *trial) endsClean() {
	tr.t.Helper()
	tr.ends("failed", tr.c.Definition.States.Failed)
	if got := tr.list(); len(got) != 0 {
		tr.t.Errorf("undone, the resource still lists %v", got)
	}
	claims, err := claims.Live(testkit.Context(tr.t), tr.c.DB.Pool(pg.RoleLifecycle), tr.ws)
	if err != nil {
		tr.t.Fatal(err)
	}
	if len(claims) != 0 {
		tr.t.Errorf("undone, claims are still live: %+v", claims)
	}
}

func (tr *trial) list() []string {
	tr.t.Helper()
	got, err := tr.c.Resource.List(testkit.Context(tr.t))
	if err != nil {
		tr.t.Fatal(err)
	}
	return got
}

func (tr *trial) wasHit() {
	tr.t.Helper()
	if _, hits := tr.plan.passed(); hits == 0 {
		tr.t.Error("the intended fault was not reached: this run shows nothing")
	}
}

func (tr *trial) clean() {
	tr.t.Helper()
	if tr.c.Clean == nil {
		return
	}
	if err := tr.c.Clean(testkit.Context(tr.t), tr.ws); err != nil {
		tr.t.Fatal(err)
	}
	if got := tr.list(); len(got) != 0 {
		tr.t.Fatalf("cleaned, the resource still lists %v", got)
	}
}
