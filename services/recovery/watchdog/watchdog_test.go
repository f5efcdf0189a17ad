package watchdog_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/watchdog"
)

const (
	open      = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_OPEN
	recovered = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED
	withheld  = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_WITHHELD
	gaveUp    = commonv1.RecoveryOutcome_RECOVERY_OUTCOME_FAILED
	stalled   = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_STALLED
	lost      = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_SESSION_LOST
	manual    = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_MANUAL
	kRecreate = commonv1.OperationKind_OPERATION_KIND_RECREATE
	kRetry    = commonv1.OperationKind_OPERATION_KIND_RETRY
	brakeKind = commonv1.IncidentKind_INCIDENT_KIND_FLEET_BRAKE
	churnKind = commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET
	classKind = commonv1.IncidentKind_INCIDENT_KIND_STEP_CLASS
	machine   = commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE
	asked     = "watchdog:service/recovery"
)

// detect lets a detection become a request.
func (k *kit) detect() {
	k.t.Helper()
	k.beat()
	k.round()
	k.pass(6 * time.Second)
	k.beat()
	k.round()
}

func TestInstanceWithoutSessionIsRecreatedAndRecorded(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.listen(time.Minute)
	if out := k.round(); out.Opened != 0 {
		t.Fatalf("a healthy workspace: %+v", out)
	}
	k.lose(b)
	k.listen(time.Minute)
	if out := k.round(); out.Opened != 0 {
		t.Fatalf("within what the policy allows: %+v", out)
	}
	k.listen(70 * time.Second)
	k.detect()
	k.wantAsked(1)
	req := k.owner.asked()[0]
	rec := k.record(b)
	if req.GetKind() != kRecreate || req.GetRequester() != "watchdog" || req.GetWorkspaceId() != b.ws.GetWorkspaceId() ||
		req.GetIdempotencyKey() == "" ||
		req.GetCorrelationId() == "" || req.GetCorrelationId() != rec.GetCorrelationId() {
		t.Fatalf("%v of %v", req, rec)
	}
	k.wantOutcome(rec, open)
	if rec.GetTrigger() != lost || rec.GetOperationId() == "" || rec.GetAttempts() != 1 || rec.GetStartedAt() == nil ||
		rec.GetErrorCode() != "session_superseded" {
		t.Fatalf("%v", rec)
	}
	// Until the operation ends no further request is made.
	k.start(b, kRecreate, rec.GetOperationId(), asked, recreating)
	k.listen(time.Minute)
	k.round()
	k.wantAsked(1)
	k.back(b)
	k.succeed(b)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "recreate" || rec.GetTotalSeconds() < 60 || rec.GetUserImpact() == "" ||
		rec.GetEndedAt() == nil {
		t.Fatalf("%v", rec)
	}
	if out := k.round(); out.Opened+out.Asked != 0 {
		t.Fatalf("after the end: %+v", out)
	}
}

func TestSessionThatComesBackEndsTheRecoveryByItself(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.lose(b)
	k.listen(130 * time.Second)
	k.round()
	k.wantOutcome(k.record(b), open)
	k.back(b)
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "by itself" {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(0)
}

// A session that moved to another replica while events wait is not silence of its node: the replica that the watchdog
// knows of has gone.
func TestALagOfEventsIsNoSilence(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.listen(time.Minute)
	k.round()
	k.behind = true
	k.append(&nodev1.SessionChanged{
		SessionId: ids.New(), NodeId: b.session.GetNodeId(), ReplicaId: ids.New(), Generation: b.session.GetGeneration() + 1,
		State: commonv1.SessionState_SESSION_STATE_ADMITTED,
	})
	k.replica = ids.New()
	k.listen(5 * time.Minute)
	k.round()
	k.wantAsked(0)
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 0 {
		t.Fatalf("%d recoveries of a box whose session stands", n)
	}
}

// admit has recovery confirm a session of the instance's node, whose event is not read yet.
func (k *kit) admit(b *instance) {
	k.t.Helper()
	session, node := ids.New(), b.session.GetNodeId()
	for _, statement := range []string{
		`INSERT INTO recovery.identity (node_id, name, node_instance_id, state) VALUES ($2, 'box', $1, 'active')`,
		`INSERT INTO recovery.session_open (session_id, node_id, node_instance_id, verdict, serial, fence_epoch)
			VALUES ($1, $2, $1, 'welcome', 'x', 0)`,
		`UPDATE recovery.identity SET confirmed_session_id = $1 WHERE node_id = $2`,
	} {
		_, err := k.db.Pool(pg.RoleRecovery).Exec(k.ctx, statement, session, node)
		k.must(err)
	}
}

// Scenario: a node is back after more than two minutes, and recovery has confirmed its session in the very moment in
// which the recreation of its workspace is due. The event of that session comes later. The instance is not replaced,
// and if the node is silent again, its time begins with that session.
func TestASessionThatIsConfirmedAlreadyIsHeard(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.lose(b)
	k.listen(130 * time.Second)
	k.round()
	k.wantOutcome(k.record(b), open)
	k.admit(b)
	k.listen(6 * time.Second)
	k.round()
	k.wantAsked(0)
	k.listen(100 * time.Second)
	k.round()
	k.wantAsked(0)
	k.listen(30 * time.Second)
	k.round()
	k.wantAsked(1)
}

// Silence is evidence only while a replica of nodeapi listens: if all replicas are dead there are no recreations, and
// when they are back, absent nodes have their full time again, and ten seconds in which all come back.
func TestSilenceWithoutAListenerIsNoEvidence(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.pass(10 * time.Minute) // the replica died with its session
	if out := k.round(); out.Opened != 0 {
		t.Fatalf("while nobody listens: %+v", out)
	}
	k.replica = ids.New()
	k.listen(time.Minute)
	if out := k.round(); out.Opened != 0 {
		t.Fatalf("a minute after listening began: %+v", out)
	}
	k.listen(time.Minute + 10*time.Second)
	if out := k.round(); out.Opened != 0 {
		t.Fatalf("within the ten seconds: %+v", out)
	}
	k.listen(10 * time.Second)
	if out := k.round(); out.Opened != 1 {
		t.Fatalf("two minutes of silence, listened to: %+v", out)
	}
	if rec := k.record(b); rec.GetTrigger() != lost {
		t.Fatalf("%v", rec)
	}
}

// A stalled operation still owns its workspace: lifecycle joins the request to it, and nothing interferes with it. When
// it has ended by itself, the workspace is recreated.
func TestStalledOperationIsJoinedAndItsEndFollowed(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "1")
	b := k.provision("acme", "one", byProcess)
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return &lifecyclev1.Operation{
				OperationId: b.run.GetRunId(), WorkspaceId: r.GetWorkspaceId(), Joined: true,
				Epoch: 1,
			}, nil
		}
	})
	k.stall(b, 3)
	k.detect()
	k.wantAsked(1)
	rec := k.record(b)
	k.wantOutcome(rec, open)
	if rec.GetTrigger() != stalled || rec.GetStep() != steps[3] || rec.GetOperationId() != b.run.GetRunId() ||
		rec.GetAttempts() != 0 ||
		!strings.Contains(rec.GetCause(), "workload database") || !strings.Contains(rec.GetWithheldBecause(), "joined") {
		t.Fatalf("%v", rec)
	}
	for range 3 {
		k.pass(10 * time.Minute)
		k.round()
	}
	k.wantAsked(1) // one request joined it, and no other is made
	k.undo(b, 3, "deadline_of_step_exceeded")
	k.round()
	k.wantAsked(1) // undo states never trigger
	k.fail(b, 3, "deadline_of_step_exceeded")
	op := ids.New()
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return &lifecyclev1.Operation{OperationId: op, WorkspaceId: r.GetWorkspaceId(), Kind: kRecreate, Epoch: 2}, nil
		}
	})
	k.round()
	k.wantAsked(2) // the join gave its token back: there was only one
	if a, b := k.owner.asked()[0].GetIdempotencyKey(), k.owner.asked()[1].GetIdempotencyKey(); a == b {
		t.Fatalf("another attempt under the same key %s", a)
	}
	k.start(b, kRecreate, op, asked, recreating)
	k.succeed(b)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "recreate" || rec.GetAttempts() != 1 {
		t.Fatalf("%v", rec)
	}
}

func TestPersonWhoCancelsResetsAndRetriesIsNotFought(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return &lifecyclev1.Operation{
				OperationId: b.run.GetRunId(), WorkspaceId: r.GetWorkspaceId(), Joined: true,
				Epoch: 1,
			}, nil
		}
	})
	k.stall(b, 3)
	k.detect()
	k.wantAsked(1)
	b.run.CancelBy, b.run.CancelRequestedAt = "user:ada", b.run.GetCreatedAt()
	b.ws.State = commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING
	k.put(b.run, b.ws)
	k.round()
	k.fail(b, 3, "cancel_requested")
	for range 3 {
		k.pass(5 * time.Minute)
		k.round()
	}
	k.wantAsked(1)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if rec.GetTrigger() != manual {
		t.Fatalf("%v", rec)
	}
	k.start(b, kRetry, ids.New(), "user:ada", provisioning)
	k.round()
	k.succeed(b)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "retry" || rec.GetOperationId() != b.run.GetRunId() || rec.GetStep() != steps[3] {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(1)
}

func TestRecoveryByPeopleAloneIsRecorded(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	k.fail(b, 4, "launch_failed")
	k.pass(3 * time.Minute)
	k.start(b, kRetry, ids.New(), "user:ada", provisioning)
	k.succeed(b)
	k.round()
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetTrigger() != manual || rec.GetWhatWorked() != "retry" || rec.GetStep() != steps[4] ||
		rec.GetErrorCode() != "launch_failed" ||
		rec.GetTotalSeconds() < 180 || rec.GetOperationId() != b.run.GetRunId() {
		t.Fatalf("%v", rec)
	}
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 1 {
		t.Fatalf("%d records", n)
	}
	k.wantAsked(0)
}

// Scenario: people whose names are or begin with the watchdog's retry a workspace, and lifecycle stores their names
// alone. Each recovery is recorded as a person's; that of a watchdog's own request is not.
func TestAPersonsNameMayBeginWithTheWatchdogs(t *testing.T) {
	for requester, records := range map[string]int{"watchdog-x": 1, "watchdog": 1, "user:watchdog": 1, asked: 0} {
		k := newKit(t)
		b := k.provision("acme", "one", byProcess)
		k.fail(b, 4, "launch_failed")
		k.pass(3 * time.Minute)
		k.start(b, kRetry, ids.New(), requester, provisioning)
		k.succeed(b)
		k.round()
		if n := k.count(`SELECT count(*) FROM recovery.recovery_record WHERE trigger = 'manual'`); n != records {
			t.Errorf("%s: %d records, want %d", requester, n, records)
		}
	}
}

// Scenario: a person named as the watchdog recreates a workspace while a request of the watchdog is not answered. From
// then on that person decides about it.
func TestAPersonNamedAsTheWatchdogIsAPerson(t *testing.T) {
	k := newKit(t)
	b := k.unanswered("acme", "one", byProcess)
	b.ws.Epoch = 2
	k.start(b, kRecreate, ids.New(), "watchdog", recreating)
	k.listen(time.Minute)
	k.round()
	k.wantWithdrawn()
	if rec := k.record(b); rec.GetTrigger() != manual {
		t.Fatalf("%v", rec)
	}
}

func TestUndoStatesNeverTrigger(t *testing.T) {
	for _, state := range []commonv1.WorkspaceState{
		commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING, commonv1.WorkspaceState_WORKSPACE_STATE_STUCK,
		commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONING, commonv1.WorkspaceState_WORKSPACE_STATE_DECOMMISSIONED,
		commonv1.WorkspaceState_WORKSPACE_STATE_FAILED,
		provisioning, recreating, // which a workspace is while its operation goes back by itself
	} {
		t.Run(state.String(), func(t *testing.T) {
			k := newKit(t)
			b := k.up("acme", "one", byProcess, ids.New())
			k.lose(b)
			b.ws.State, b.ws.RegisterFailures = state, 9
			k.put(b.ws)
			b.run.State, b.run.FinishedAt = commonv1.RunState_RUN_STATE_COMPENSATING, nil
			b.run.Phase, b.run.StuckReason = "undo", `step_stalled: no progress at "Allocate storage"`
			k.put(b.run)
			k.listen(5 * time.Minute)
			k.detect()
			k.wantAsked(0)
			if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 0 {
				t.Fatalf("%d records of a workspace that is %v", n, state)
			}
		})
	}
}

func TestWorkspaceThatGetsStuckIsLeftToPeople(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	rec := k.record(b)
	k.start(b, kRecreate, rec.GetOperationId(), asked, recreating)
	k.undo(b, 1, "launch_failed")
	b.run.State, b.run.StuckReason = commonv1.RunState_RUN_STATE_STUCK, "undo_exhausted: the box does not end"
	b.ws.State = commonv1.WorkspaceState_WORKSPACE_STATE_STUCK
	k.put(b.run, b.ws)
	for range 3 {
		k.listen(time.Minute)
		k.round()
	}
	rec = k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "the box does not end") {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(1)
}

func TestFailedAttemptsAreRepeatedTwiceAndNotInACircle(t *testing.T) {
	for _, tt := range []struct {
		name  string
		codes []string
		asked int
	}{
		{"the same error twice", []string{"launch_failed", "launch_failed"}, 2},
		{"three errors", []string{"launch_failed", "placement_unavailable", "launch_failed"}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := newKit(t)
			b := k.up("acme", "one", byProcess, ids.New())
			k.lose(b)
			k.listen(130 * time.Second)
			k.detect()
			for _, code := range tt.codes {
				k.start(b, kRecreate, k.record(b).GetOperationId(), asked, recreating)
				k.fail(b, 1, code)
				k.listen(10 * time.Second)
				k.round()
			}
			rec := k.record(b)
			k.wantOutcome(rec, gaveUp)
			if rec.GetStep() != steps[1] || rec.GetErrorCode() != "launch_failed" || int(rec.GetAttempts()) != tt.asked {
				t.Fatalf("%v", rec)
			}
			k.wantAsked(tt.asked)
			k.listen(time.Minute)
			k.round()
			k.wantAsked(tt.asked)
		})
	}
}

// The previous epoch is not confirmed ended: the recreation is withheld for that reason, and tried again later under
// the same key.
func TestRefusalsWithholdWithTheirReason(t *testing.T) {
	k := newKit(t)
	k.cfg.RefusedFirst = 2 * time.Minute
	k.w = k.watchdog("")
	b := k.up("acme", "one", byProcess, ids.New())
	k.owner.set(func() {
		k.owner.answer = func(*lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return nil, fault.New(commonv1.Reason_REASON_PREVIOUS_EPOCH_ALIVE, "epoch 1 is not confirmed ended")
		}
	})
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "previous_epoch_alive") || rec.GetNextAt() == nil ||
		rec.GetAttempts() != 0 {
		t.Fatalf("%v", rec)
	}
	k.round()
	k.wantAsked(1)
	for range 10 {
		k.listen(5 * time.Minute)
		k.round()
	}
	// More requests than the budget of an hour has tokens: a refusal gives its token back.
	k.wantAsked(11)
	first := k.owner.asked()[0].GetIdempotencyKey()
	for _, r := range k.owner.asked() {
		if r.GetIdempotencyKey() != first {
			t.Fatalf("keys %s and %s of one attempt", first, r.GetIdempotencyKey())
		}
	}
	k.owner.set(func() { k.owner.answer = nil })
	k.listen(5 * time.Minute)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, open)
	if rec.GetWithheldBecause() != "" || rec.GetOperationId() == "" {
		t.Fatalf("%v", rec)
	}
}

// After a crash between the request and the record of its answer the same key is sent again, and returns the same
// operation.
func TestLostAnswerIsAskedAgainUnderTheSameKey(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.owner.set(func() { k.owner.after = func() error { return context.DeadlineExceeded } })
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(1)
	k.wantOutcome(k.record(b), open)
	k.owner.set(func() { k.owner.after = nil })
	k.listen(20 * time.Second) // its lease is over: another replica goes on
	k.w = k.watchdog("")
	k.beat()
	if out := k.round(); !out.Leased || out.Asked != 1 {
		t.Fatalf("%+v", out)
	}
	list := k.owner.asked()
	if len(list) != 2 || list[0].GetIdempotencyKey() != list[1].GetIdempotencyKey() {
		t.Fatalf("%v", list)
	}
	rec := k.record(b)
	if rec.GetOperationId() == "" || rec.GetAttempts() != 1 || len(k.owner.byKey) != 1 {
		t.Fatalf("%v", rec)
	}
	if n := k.count(`SELECT round(4 - tokens)::int FROM recovery.churn_bucket WHERE scope = 'workspace'`); n != 1 {
		t.Fatalf("%d tokens for one recreation", n)
	}
}

// Two watchdogs that both believe that they have the lease act at once, again and again: there is one operation for
// each workspace.
func TestTwoWatchdogsAtOnceMakeOneOperation(t *testing.T) {
	k := newKit(t)
	k.policySet("churn.recreates_per_hour", "60")
	var instances []*instance
	for range 40 {
		instances = append(instances, k.up("acme", ids.New(), byProcess, ids.New()))
	}
	for _, b := range instances[:4] {
		k.lose(b)
	}
	k.listen(130 * time.Second)
	k.round()
	k.pass(6 * time.Second)
	k.beat()
	others := []*watchdog.Watchdog{k.watchdog(""), k.watchdog(""), k.watchdog("")}
	var all sync.WaitGroup
	owner := k.db.OwnerPool()
	for _, w := range others {
		all.Go(func() {
			for range 10 {
				// The holder of the lease loses it at once, and goes on without noticing.
				if _, err := owner.Exec(k.ctx, `UPDATE recovery.watchdog_lease SET until = '-infinity'`); err != nil {
					t.Error(err)
				}
				if _, err := w.RunOnce(k.ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if n := len(k.owner.byKey); n != 4 {
		t.Errorf("%d operations for 4 workspaces", n)
	}
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record WHERE attempts = 1 AND following`); n != 4 {
		t.Errorf("%d records follow their one operation", n)
	}
	if n := k.count(`SELECT round(sum(60 - tokens))::int FROM recovery.churn_bucket WHERE scope = 'workspace'`); n != 4 {
		t.Errorf("%d tokens for 4 recreations", n)
	}
}

func TestOneActsAtATimeAndAnotherTakesOver(t *testing.T) {
	k := newKit(t)
	k.cfg.Lease = 10 * time.Minute
	k.w = k.watchdog("")
	second := k.watchdog("")
	if out := k.round(); !out.Leased {
		t.Fatal("nobody acts")
	}
	for range 3 {
		if out, err := second.RunOnce(k.ctx); err != nil || out.Leased {
			t.Fatalf("two act at once: %+v %v", out, err)
		}
		k.pass(5 * time.Minute)
		if out := k.round(); !out.Leased {
			t.Fatal("the lease is not renewed")
		}
	}
	k.pass(11 * time.Minute) // it died
	if out, err := second.RunOnce(k.ctx); err != nil || !out.Leased {
		t.Fatalf("nobody takes over: %+v %v", out, err)
	}
	if out := k.round(); out.Leased {
		t.Fatal("the dead one acts again")
	}
}

func TestEventReplayChangesNothing(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	c := k.provision("acme", "two", byProcess)
	k.stall(c, 2)
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	before := k.digest()
	list, _, err := events.Read(k.ctx, k.db.Pool(pg.RoleRecovery), 0, watchdog.Kinds(), 1000)
	k.must(err)
	for range 2 {
		for _, r := range slices.Backward(list) {
			k.must(pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery),
				func(ctx context.Context, tx pgx.Tx) error { return watchdog.Apply(ctx, tx, r) }))
		}
	}
	if after := k.digest(); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	k.wantAsked(2)
	k.round()
	k.wantAsked(2)
}

func TestPoisonIsRefused(t *testing.T) {
	k := newKit(t)
	for kind, m := range map[string]proto.Message{
		"workspace.changed": &lifecyclev1.Workspace{WorkspaceId: ids.New()},
		"run.changed":       &lifecyclev1.Run{RunId: ids.New()},
	} {
		raw := []byte(`{}`)
		err := pg.InTx(k.ctx, k.db.Pool(pg.RoleRecovery), func(ctx context.Context, tx pgx.Tx) error {
			return watchdog.Apply(ctx, tx, events.Record{Kind: kind, Stored: raw, AggregateVersion: 1})
		})
		if err == nil || errors.Is(err, context.Canceled) {
			t.Errorf("%s without a state (%v): %v", kind, m, err)
		}
	}
}
