package operation

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/provision"
	"github.com/gpuaas/mesh/services/lifecycle/saga/runs"
)

// asService returns the context of a request by a service.
func asService(ctx context.Context, name string) context.Context {
	return rpc.WithPeer(ctx, pki.Peer{ID: pki.ID{Kind: pki.KindService, Name: name}})
}

// watchdogs returns a change that makes a request the watchdog's, about an epoch.
func watchdogs(key string, epoch int64) func(*lifecyclev1.RequestOperationRequest) {
	return func(r *lifecyclev1.RequestOperationRequest) {
		r.Requester, r.IdempotencyKey, r.ExpectedEpoch, r.Reason = "watchdog", key, epoch, "stalled: its box does not come"
	}
}

// begun requests a workspace and does not wait for it.
func (p *cluster) begun(where commonv1.PlacementDriver) (string, string) {
	p.t.Helper()
	res, err := p.seats[0].server.RequestOperation(p.t.Context(), &lifecyclev1.RequestOperationRequest{
		Kind: commonv1.OperationKind_OPERATION_KIND_CREATE,
		Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
			Tenant: p.tenant(), Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Placement: where, Gpus: 1},
		}},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return res.GetOperation().GetWorkspaceId(), res.GetOperation().GetOperationId()
}

// dead sets up to which epoch the agents of instances never connect.
func (p *cluster) dead(to int64) {
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	p.world.deadTo = to
}

func (p *cluster) run(id string) runs.Run {
	p.t.Helper()
	r, err := runs.Get(testkit.Context(p.t), p.db.Pool(pg.RoleLifecycle), id)
	if err != nil {
		p.t.Fatal(err)
	}
	return r
}

// parked waits until a run waits at a step for the given reason, attempt after attempt.
func (p *cluster) parked(run, step, why string) {
	p.t.Helper()
	testkit.Eventually(p.t, testkit.Patience, func() error {
		if r := p.run(run); r.State != "waiting" || r.StepName() != step || !strings.Contains(r.WhyWaiting, why) {
			return fmt.Errorf("it is %s at %q: %s", r.State, r.StepName(), r.WhyWaiting)
		}
		return nil
	})
}

const noAgent = "waiting for the agent on the workspace's node to connect"

// stalls lets a run that waits for its instance be flagged.
func (p *cluster) stalls(run string, ahead time.Duration) {
	p.t.Helper()
	p.parked(run, provision.StepStorage, "waiting for the agent")
	p.unleased(run, func() { testkit.SetClockOffset(p.db, ahead) })
	testkit.Eventually(p.t, testkit.Patience, func() error {
		if r := p.run(run); !strings.HasPrefix(r.StuckReason, "step_stalled") || r.State != "waiting" {
			return fmt.Errorf("it is %s: %q", r.State, r.StuckReason)
		}
		return nil
	})
}

// unleased calls a function at a moment at which no replica leases the run and none can: the mesh's clock is stopped,
// so that a run which waits is not due. Minutes that pass while a replica leases the run end its lease and its attempt.
func (p *cluster) unleased(run string, call func()) {
	p.t.Helper()
	testkit.StopClock(p.db)
	testkit.Eventually(p.t, testkit.Patience, func() error {
		if r := p.run(run); r.Owner != "" {
			return fmt.Errorf("%s leases it: %s", r.Owner, r.WhyWaiting)
		}
		return nil
	})
	call()
	testkit.StartClock(p.db)
}

// watchdog sends the request as the watchdog until it has found the run at rest: a driver may be driving the run just
// then.
func (p *cluster) watchdog(id, key string, epoch int64) *lifecyclev1.Operation {
	p.t.Helper()
	var op *lifecyclev1.Operation
	testkit.Eventually(p.t, testkit.Patience, func() error {
		var err error
		op, err = p.seats[0].ask(asService(testkit.Context(p.t), "recovery"), kRecreate, id, watchdogs(key, epoch))
		if err != nil && !fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
			p.t.Fatal(err)
		}
		return err
	})
	return op
}

// The instance of the first epoch never connects. The watchdog's recreation cancels the run that waits for it and takes
// that run's place in one transaction; the next instance is launched once the first is confirmed ended, and the
// workspace comes up.
func TestTheWatchdogReplacesAnInstanceThatDoesNotCome(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 2, lease: 15 * time.Second})
	p.dead(1)
	p.world.mu.Lock()
	p.world.endless = true // no end is confirmed before the test allows it
	p.world.mu.Unlock()
	id, create := p.begun(byProcess)
	p.stalls(create, 6*time.Minute)
	dry, err := p.seats[0].ask(asService(t.Context(), "recovery"), kRecreate, id, watchdogs("", 1),
		func(r *lifecyclev1.RequestOperationRequest) { r.DryRun = true })
	if err != nil || dry.GetJoined() || !strings.Contains(dry.GetConsequence(), "cancels operation "+create) ||
		p.run(create).CancelAt != nil {
		t.Fatalf("a dry run: %v %v", dry, err)
	}
	op := p.watchdog(id, "k1", 1)
	if op.GetJoined() || op.GetKind() != kRecreate || op.GetEpoch() != 2 || op.GetOperationId() == create ||
		op.GetState() != commonv1.WorkspaceState_WORKSPACE_STATE_RECREATING {
		t.Fatalf("answered %v", op)
	}
	was := p.run(create)
	if was.State != "failed" || was.CancelBy != "watchdog:service/recovery" || was.ErrorCode != "cancel_requested" ||
		was.CancelReason == "" || was.FinishedAt == nil {
		t.Fatalf("the operation that stalled is %+v", was)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND state IN ('running', 'waiting')`,
		create); n != 0 {
		t.Fatalf("%d of its attempts are open", n)
	}
	now := p.run(op.GetOperationId())
	if now.Requester != "watchdog:service/recovery" || now.ParentRunID != create || now.Kind != "recreate" ||
		p.workspace(id).RunID != now.ID {
		t.Fatalf("the operation in its place is %+v", now)
	}
	// Requests that come now are served by it: the same request again, a person's, and an old request of another watchdog.
	again := p.watchdog(id, "k1", 1)
	if !again.GetReplayed() || again.GetOperationId() != now.ID {
		t.Errorf("asked again: %v", again)
	}
	persons := func(*lifecyclev1.RequestOperationRequest) {}
	for _, other := range []func(*lifecyclev1.RequestOperationRequest){persons, watchdogs("k2", 1), watchdogs("k3", 2)} {
		if op, err := p.seats[1].ask(asService(t.Context(), "recovery"), kRecreate, id, other); err != nil ||
			!op.GetJoined() || op.GetOperationId() != now.ID {
			t.Errorf("asked beside it: %v %v", op, err)
		}
	}
	// Nothing is launched before the former instance is confirmed ended.
	testkit.Eventually(t, testkit.Patience, func() error {
		if n := p.count(`SELECT count(*) FROM lifecycle.saga_step WHERE run_id = $1 AND name = $2 AND state = 'failed'`,
			now.ID, provision.StepPrevious); n < 2 {
			return fmt.Errorf("%d attempts to end the former box", n)
		}
		return nil
	})
	p.world.mu.Lock()
	if p.world.launches[id+":2"] != 0 || p.world.launches[id+":1"] != 1 {
		t.Errorf("launched %v", p.world.launches)
	}
	p.world.endless = false
	p.world.mu.Unlock()
	if w := p.rests(id, "active"); w.Epoch != 2 || w.RunID != now.ID || w.LastError != "" || w.RegisterFailures != 0 {
		t.Errorf("afterwards %+v", w)
	}
	p.never("a replaced box")
	if got := p.world.standing(); !slices.Contains(got, "box "+id+":2") || slices.Contains(got, "box "+id+":1") {
		t.Errorf("there stand %q", got)
	}
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND released_at IS NULL AND epoch <> 2`, id); n != 0 {
		t.Errorf("%d claims of the first epoch are live", n)
	}
	var entries []string
	rows, err := p.db.Pool(pg.RoleLifecycle).Query(t.Context(),
		`SELECT concat_ws(' ', payload->>'action', payload->>'workflow_id') FROM events.event
		WHERE kind = $1 AND payload->>'workspace_id' = $2`, audit.Kind, id)
	if err == nil {
		entries, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if err != nil || !slices.Contains(entries, "tenant.provisioning.failed "+create) {
		t.Errorf("entries %q: %v", entries, err)
	}
}

// The tenant's resources outside the instance outlive it: schema and handle are kept, as in every recreation, though
// the operation that had adopted them is cancelled.
func TestAReplacedRecreationKeepsSchemaAndHandle(t *testing.T) {
	t.Parallel()
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	id := p.create(p.tenant(), "demo", byProcess)
	p.dead(2)
	op, err := p.seats[0].ask(t.Context(), kRecreate, id)
	if err != nil {
		t.Fatal(err)
	}
	p.stalls(op.GetOperationId(), 6*time.Minute)
	if next := p.watchdog(id, "k1", 2); next.GetJoined() || next.GetEpoch() != 3 {
		t.Fatalf("answered %v", next)
	}
	if w := p.rests(id, "active"); w.Epoch != 3 {
		t.Errorf("epoch %d", w.Epoch)
	}
	p.never("a replaced recreation")
	if n := p.count(`SELECT count(*) FROM lifecycle.resource_claim
		WHERE workspace_id = $1 AND kind IN ('handle', 'schema')`, id); n != 2 {
		t.Errorf("%d claims of handle and schema: they were made anew", n)
	}
}

// Only the watchdog replaces a run, and only one that waits for an instance of its own that has no session and counts
// as stalled. Every other caller joins it.
func TestOnlyAStalledWaitForAnInstanceIsReplaced(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	joins := func(when, id, run string, ctx context.Context, change ...func(*lifecyclev1.RequestOperationRequest)) {
		t.Helper()
		testkit.Eventually(t, testkit.Patience, func() error {
			op, err := p.seats[0].ask(ctx, kRecreate, id, change...)
			if fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
				return err
			}
			if err != nil || !op.GetJoined() || op.GetOperationId() != run {
				t.Fatalf("%s: %v %v", when, op, err)
			}
			return nil
		})
		if r := p.run(run); r.CancelAt != nil || !r.Live() {
			t.Fatalf("%s: the operation is %s, cancelled at %v", when, r.State, r.CancelAt)
		}
	}
	recovery := asService(t.Context(), "recovery")
	p.dead(1)
	id, run := p.begun(byProcess)
	p.parked(run, provision.StepStorage, noAgent)
	joins("not stalled yet", id, run, recovery, watchdogs("a", 1))
	p.stalls(run, 6*time.Minute)
	joins("its user", id, run, t.Context())
	joins("an operator", id, run, rpc.WithPerson(t.Context(), rpc.Person{Subject: "olga", Roles: []string{"operator"}}))
	joins("a person in the watchdog's name", id, run,
		rpc.WithPerson(recovery, rpc.Person{Subject: "olga", Roles: []string{"operator"}}), watchdogs("b", 1))
	joins("another service", id, run, asService(t.Context(), "nodeapi"), watchdogs("c", 1))
	joins("recovery for somebody else", id, run, recovery,
		func(r *lifecyclev1.RequestOperationRequest) { r.Requester = "admin" })
	joins("another epoch", id, run, recovery, watchdogs("d", 7))
	p.beat(-time.Hour)
	joins("nobody listens to boxes", id, run, recovery, watchdogs("e", 1))
	p.beat(time.Hour)

	// The instance comes, and hangs at something else.
	p.world.mu.Lock()
	p.world.mute = true
	p.world.mu.Unlock()
	p.dead(0)
	p.parked(run, provision.StepStorage, "waiting for the agent to make")
	if r := p.run(run); !strings.HasPrefix(r.StuckReason, "step_stalled") {
		t.Fatalf("the flag was taken back: %q", r.StuckReason)
	}
	joins("its box has a session", id, run, recovery, watchdogs("f", 1))
	p.world.mu.Lock()
	p.world.mute, p.world.unready = false, true
	p.world.mu.Unlock()
	p.parked(run, provision.StepReady, "")
	// The same flag at another step. The driver checks the step each second, and clears the flag where the step is young:
	// a request counts only if the flag was set before and after it.
	tries := 0
	testkit.Eventually(t, testkit.Patience, func() error {
		tries++
		_, err := p.db.Pool(pg.RoleLifecycle).Exec(t.Context(), `UPDATE lifecycle.saga_run
			SET stuck_reason = 'step_stalled: a test', version = version + 1 WHERE id = $1`, run)
		if err != nil {
			t.Fatal(err)
		}
		joins("it hangs at another step", id, run, recovery, watchdogs(fmt.Sprintf("g%d", tries), 1))
		r := p.run(run)
		if r.StepName() != provision.StepReady {
			t.Fatalf("it is at %q", r.StepName())
		}
		if !strings.HasPrefix(r.StuckReason, "step_stalled") {
			return errors.New("the flag was taken back meanwhile")
		}
		return nil
	})
}

// A machine that existed before the workspace is not replaced: without a session it does not show that the wait is in
// vain.
func TestAMachineIsNotReplaced(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.machine("m1")
	p.world.mu.Lock()
	p.world.mute = true
	p.world.mu.Unlock()
	id, run := p.begun(byStatic)
	p.stalls(run, 6*time.Minute)
	p.beat(-time.Hour)
	op := p.watchdog(id, "k1", 1)
	if !op.GetJoined() || op.GetOperationId() != run || p.run(run).CancelAt != nil {
		t.Fatalf("answered %v", op)
	}
}

// A person's cancel wins, whether it came before the watchdog's request or after it: nothing is recreated behind it,
// and a decommission goes on from there.
func TestACancelWinsOverTheWatchdog(t *testing.T) {
	for _, first := range []bool{true, false} {
		t.Run(fmt.Sprintf("first %v", first), func(t *testing.T) {
			p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
			p.dead(5)
			id, run := p.begun(byProcess)
			p.stalls(run, 6*time.Minute)
			epoch := int64(1)
			if !first {
				run, epoch = p.watchdog(id, "k0", 1).GetOperationId(), 2
				p.parked(run, provision.StepStorage, noAgent) // there is an instance to end
			}
			p.world.mu.Lock()
			p.world.endless = true // so that the undo stays open
			p.world.mu.Unlock()
			if _, err := p.seats[0].ask(t.Context(), kCancel, id); err != nil {
				t.Fatal(err)
			}
			_, err := p.seats[0].ask(asService(t.Context(), "recovery"), kRecreate, id, watchdogs("k1", epoch))
			want(t, err, commonv1.Reason_REASON_OPERATION_IN_PROGRESS)
			testkit.Eventually(t, testkit.Patience, func() error {
				if p.count(`SELECT count(*) FROM lifecycle.saga_step
					WHERE run_id = $1 AND dir = 'undo' AND state = 'failed'`, run) == 0 {
					return errors.New("no attempt to end the instance has failed")
				}
				return nil
			})
			p.unleased(run, func() {
				p.world.mu.Lock()
				p.world.endless = false
				p.world.mu.Unlock()
				testkit.SetClockOffset(p.db, 8*time.Minute) // the undo is tried again, which takes time
			})
			if w := p.rests(id, "failed"); w.Epoch != epoch || w.RunID != run || w.LastErrorCode != "cancel_requested" {
				t.Fatalf("it ended as %+v", w)
			}
			if n := p.count(`SELECT count(*) FROM lifecycle.saga_run WHERE workspace_id = $1`, id); n != int(epoch) {
				t.Errorf("%d operations", n)
			}
			if got := p.world.standing(); len(got) != 0 {
				t.Errorf("there stand %q", got)
			}
			if _, err := p.seats[0].ask(t.Context(), kDecommission, id); err != nil {
				t.Fatal(err)
			}
			_, err = p.seats[0].ask(asService(t.Context(), "recovery"), kRecreate, id, watchdogs("k2", epoch))
			if err == nil {
				t.Error("a workspace that is being decommissioned was recreated")
			}
			p.rests(id, "decommissioned")
			p.never("a cancel")
		})
	}
}

// A recreation that cannot begin does not cancel the run that it would replace: both are one transaction.
func TestAReplacementThatCannotBeginCancelsNothing(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 1, lease: 15 * time.Second})
	p.dead(1)
	id, run := p.begun(byProcess)
	p.stalls(run, 6*time.Minute)
	p.seats[0].server.deps.Catalogue.Regions = []string{"elsewhere"}
	testkit.Eventually(t, testkit.Patience, func() error {
		_, err := p.seats[0].ask(asService(t.Context(), "recovery"), kRecreate, id, watchdogs("k1", 1))
		if fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
			return err
		}
		want(t, err, commonv1.Reason_REASON_REGION_UNAVAILABLE)
		return nil
	})
	if r := p.run(run); r.CancelAt != nil || !r.Live() || p.workspace(id).Epoch != 1 {
		t.Errorf("it is %s, cancelled at %v", r.State, r.CancelAt)
	}
}

// Watchdogs, users and a cancel send requests at the same time, again and again: one operation is open at any moment,
// each epoch has one instance, and a caller who got an operation got one that was open or had taken its place.
func TestReplacementsTakeTurns(t *testing.T) {
	p := newCluster(t, clusterConfig{seats: 3, lease: 15 * time.Second})
	p.dead(1)
	id, run := p.begun(byProcess)
	p.stalls(run, 6*time.Minute)
	var mu sync.Mutex
	served := map[string]bool{}
	var all sync.WaitGroup
	for n := range 24 {
		all.Go(func() {
			ctx, change := asService(testkit.Context(t), "recovery"), watchdogs(fmt.Sprint("k", n), 1)
			if n%3 == 0 {
				ctx, change = testkit.Context(t), func(*lifecyclev1.RequestOperationRequest) {}
			}
			op, err := p.seats[n%3].ask(ctx, kRecreate, id, change)
			if err != nil && !fault.Has(err, commonv1.Reason_REASON_CONFLICT) {
				t.Errorf("%d: %v", n, err)
			}
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				served[op.GetOperationId()] = true
			}
		})
	}
	all.Wait()
	next := p.watchdog(id, "last", 1).GetOperationId()
	if n := p.count(`SELECT count(*) FROM lifecycle.saga_run WHERE workspace_id = $1`, id); n != 2 {
		t.Errorf("%d operations for one replacement", n)
	}
	delete(served, run)
	delete(served, next)
	if len(served) != 0 {
		t.Errorf("somebody was told of %v", served)
	}
	if w := p.rests(id, "active"); w.Epoch != 2 {
		t.Errorf("epoch %d", w.Epoch)
	}
	p.never("many at once")
}
