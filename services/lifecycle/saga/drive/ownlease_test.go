package drive_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/saga"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
	"github.com/gpuaas/mesh/services/lifecycle/saga/sagatest"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

// starting makes a workspace, starts a run on it, and calls then in the same transaction.
func (b *bed) starting(then func() error) (string, error) {
	b.T.Helper()
	var started saga.Started
	err := b.Tx(func(ctx context.Context, tx pgx.Tx) error {
		id, err := workspace.Insert(ctx, tx,
			workspace.Draft{TenantID: b.Tenant, Name: "w-" + ids.New(), CreatedBy: "test"})
		if err != nil {
			return err
		}
		started, err = b.Core.Start(ctx, tx, saga.StartRequest{
			WorkspaceID: id, Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, Definition: "toy", Requester: "test",
			NextEpoch: true,
		})
		if err != nil {
			return err
		}
		return then()
	})
	return started.RunID, err
}

func (b *bed) firstEvent(id string) *lifecyclev1.Run {
	b.T.Helper()
	var r events.Record
	run := &lifecyclev1.Run{}
	err := b.DB.Pool(pg.RoleLifecycle).QueryRow(testkit.Context(b.T),
		`SELECT body, body_type, correlation_id, tenant_id, workspace_id, workflow_id FROM `+testkit.EventRows+`
		WHERE aggregate_id = $1 AND kind = 'run.changed' AND aggregate_version = 1`, id).Scan(
		&r.Body, &r.BodyType, &r.CorrelationID, &r.TenantID, &r.WorkspaceID, &r.WorkflowID)
	if err == nil {
		err = r.Decode(run)
	}
	if err != nil {
		b.T.Fatal(err)
	}
	return run
}

// driven waits until the driver runs: it leases a run that is in the queue.
func (b *bed) driven() {
	b.T.Helper()
	_, id := b.Create("toy")
	b.Await(id, testkit.Patience, "succeeded")
}

// TestAStartLeasesItsRun checks that a run that is started beside a free worker is leased by the transaction that
// inserts it, and that its first event has the lease.
func TestAStartLeasesItsRun(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{
		Name: "toy", Version: 1, Steps: sagatest.PureSteps("one", "two"), States: sagatest.States(),
	})
	cfg := b.Config("a")
	cfg.LeaseBatch = 1                                    // its query of the queue takes one worker of eight
	cfg.Heartbeat, cfg.Lease = time.Minute, 3*time.Minute // a heartbeat raises the version that is compared
	b.Drive(cfg)
	b.driven()
	id, err := b.starting(func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	r := b.Await(id, testkit.Patience, "succeeded")
	first := b.firstEvent(id)
	if first.GetState() != commonv1.RunState_RUN_STATE_RUNNING || first.GetOwner() != "a" || first.GetFence() != 1 ||
		len(first.GetChangedSteps()) != 1 {
		t.Errorf("first event = %v", first)
	}
	if r.Fence != 1 || r.Version != 3 {
		t.Errorf("a run of two steps was leased %d times and changed to version %d", r.Fence, r.Version)
	}
	if err := b.Announced(id); err != nil {
		t.Error(err)
	}
}

// TestAStartThatIsRolledBackFreesItsWorker checks that a worker that was reserved for a run whose transaction is rolled
// back drives others.
func TestAStartThatIsRolledBackFreesItsWorker(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Workers, cfg.LeaseBatch = 1, 1
	b.Drive(cfg)
	b.driven()
	for range 3 {
		id, err := b.starting(func() error { return sagatest.ErrBoom })
		if !errors.Is(err, sagatest.ErrBoom) {
			t.Fatalf("err = %v", err)
		}
		if _, err := runs.Get(testkit.Context(t), b.DB.Pool(pg.RoleLifecycle), id); !pg.IsNoRows(err) {
			t.Errorf("a run that was rolled back = %v", err)
		}
	}
	b.driven()
}

// lender is a driver that lends a worker to every start and counts how they come back.
type lender struct{ undone, begun int }

func (l *lender) Reserve() *saga.Worker {
	return &saga.Worker{Owner: "lender", Length: time.Hour, Sent: time.Now()}
}

func (l *lender) DriveOrFree(_ context.Context, own *saga.Worker, committed bool) {
	switch {
	case own.Run == nil && !committed:
		l.undone++
	case own.Run != nil && committed:
		l.begun++
	}
}

// TestAStartThatIsRolledBackHasNoRun checks that a driver gets no run of a transaction that was rolled back: the run of
// that id may be one that a second try has inserted and that is driven.
func TestAStartThatIsRolledBackHasNoRun(t *testing.T) {
	testkit.IO(t)
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()})
	var lent lender
	b.Core.Attach(&lent)
	t.Cleanup(func() { b.Core.Detach(&lent) })
	if _, err := b.starting(func() error { return sagatest.ErrBoom }); !errors.Is(err, sagatest.ErrBoom) {
		t.Fatalf("err = %v", err)
	}
	if _, err := b.starting(func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if want := (lender{undone: 1, begun: 1}); lent != want {
		t.Errorf("the driver got %+v, want %+v", lent, want)
	}
}

// TestAStartBesideBusyWorkersWaits checks that a run is left in the queue while no worker is free, and taken from it
// afterwards.
func TestAStartBesideBusyWorkersWaits(t *testing.T) {
	testkit.IO(t)
	began, goOn := make(chan struct{}, 1), make(chan struct{})
	steps := sagatest.PureSteps("one")
	steps[0].Do = func(context.Context, *saga.Env) (saga.Outcome, error) {
		began <- struct{}{}
		<-goOn
		return saga.Done(nil), nil
	}
	b := newBed(t, saga.Definition{Name: "toy", Version: 1, Steps: steps, States: sagatest.States()})
	cfg := b.Config("a")
	cfg.Workers, cfg.LeaseBatch = 1, 1
	b.Drive(cfg)
	_, busy := b.Create("toy")
	<-began
	id, err := b.starting(func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if first := b.firstEvent(id); first.GetState() != commonv1.RunState_RUN_STATE_PENDING || first.GetOwner() != "" ||
		len(first.GetChangedSteps()) != 0 {
		t.Errorf("first event = %v", first)
	}
	close(goOn)
	b.Await(busy, testkit.Patience, "succeeded")
	b.Await(id, testkit.Patience, "succeeded")
}

// TestAStartDuringAStopIsDueAtOnce checks that a run that was leased for a driver which stops before the commit is free
// for another at once, long before its lease ends, and that a driver that has stopped leases none.
func TestAStartDuringAStopIsDueAtOnce(t *testing.T) {
	testkit.IO(t)
	def := saga.Definition{Name: "toy", Version: 1, Steps: sagatest.PureSteps("one"), States: sagatest.States()}
	b := newBed(t, def)
	cfg := b.Config("a")
	cfg.Lease, cfg.LeaseBatch = 10*time.Hour, 1
	stop := b.Drive(cfg)
	b.driven()
	id, err := b.starting(func() error { stop(); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if first := b.firstEvent(id); first.GetOwner() != "a" {
		t.Errorf("it was not leased at its start: %v", first)
	}
	later, err := b.starting(func() error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	if r := b.Run(later); r.State != "pending" || r.Owner != "" {
		t.Errorf("a driver that has stopped leased %+v", r)
	}
	o := b.Second(def)
	o.Drive(o.Config("b"))
	o.Await(id, testkit.Patience, "succeeded")
	o.Await(later, testkit.Patience, "succeeded")
}
