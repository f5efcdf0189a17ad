package watchdog_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
)

// joins makes lifecycle answer each request with the operation that is open on the instance.
func (k *kit) joins(b *instance) {
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return &lifecyclev1.Operation{
				OperationId: b.run.GetRunId(), WorkspaceId: r.GetWorkspaceId(), Joined: true,
				Epoch: b.ws.GetEpoch(),
			}, nil
		}
	})
}

// attempt returns an attempt of the present step of the instance's operation.
func (b *instance) attempt(n int32, state commonv1.AttemptState, stalled bool, version int64) *lifecyclev1.StepAttempt {
	step := b.run.GetStep()
	return &lifecyclev1.StepAttempt{
		RunId: b.run.GetRunId(), Step: step, Name: steps[step], Direction: commonv1.Direction_DIRECTION_DO, Attempt: n,
		Stalled: stalled, Version: version,
		State: state,
	}
}

// moves reports the instance's operation as it stands, with the attempts that changed with it.
func (k *kit) moves(b *instance, stuck string, changed ...*lifecyclev1.StepAttempt) {
	k.t.Helper()
	b.run.StuckReason, b.run.ChangedSteps = stuck, changed
	k.put(b.run)
	b.run.ChangedSteps = nil
}

const (
	attemptFailed    = commonv1.AttemptState_ATTEMPT_STATE_FAILED
	attemptLost      = commonv1.AttemptState_ATTEMPT_STATE_LOST
	attemptRunning   = commonv1.AttemptState_ATTEMPT_STATE_RUNNING
	attemptSucceeded = commonv1.AttemptState_ATTEMPT_STATE_SUCCEEDED
)

// A stalled attempt that timed out, was lost or is tried again has recovered nothing. The stall is one recovery over
// all attempts of its step, and its end is the step's success.
func TestOnlyTheStepsSuccessEndsAStall(t *testing.T) {
	for _, asks := range []bool{false, true} {
		for _, ended := range []commonv1.AttemptState{attemptFailed, attemptLost} {
			k := newKit(t)
			b := k.provision("acme", "one", byProcess)
			k.joins(b)
			k.stall(b, 5)
			k.round()
			if asks {
				k.detect()
				k.wantAsked(1)
			}
			is := func(when string) {
				t.Helper()
				k.round()
				if rec := k.record(b); rec.GetEndedAt() != nil || rec.GetOutcome() == recovered {
					t.Fatalf("asked %v, %v: %s: %v", asks, ended, when, rec)
				}
				if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 1 {
					t.Fatalf("asked %v, %v: %s: %d records of one stall", asks, ended, when, n)
				}
			}
			k.moves(b, "", b.attempt(1, ended, true, 6))
			is("its attempt has ended")
			k.moves(b, "", b.attempt(2, attemptRunning, false, 1))
			is("another attempt runs")
			k.put(b.attempt(2, attemptRunning, false, 2))
			is("that attempt beats")
			k.pass(11 * time.Minute)
			k.moves(b, `step_stalled: no progress at "`+steps[5]+`" for 00:10:00`, b.attempt(2, attemptRunning, true, 3))
			is("that attempt stalls as well")
			b.run.Step = 6
			done := b.attempt(2, attemptSucceeded, true, 4)
			done.Step, done.Name = 5, steps[5]
			k.moves(b, "", done)
			k.round()
			rec := k.record(b)
			k.wantOutcome(rec, recovered)
			if rec.GetWhatWorked() != "by itself" || rec.GetStep() != steps[5] || rec.GetTotalSeconds() < 660 {
				t.Fatalf("asked %v, %v: %v", asks, ended, rec)
			}
			k.metric("watchdog_recoveries_ended_total", "recovered", 1)
			k.succeed(b)
			if out := k.round(); out.Opened != 0 {
				t.Fatalf("%+v", out)
			}
		}
	}
}

// An update about progress ends the requests, not the recovery: an operation that has moved once may stall again.
func TestProgressAloneIsNoRecovery(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	k.stall(b, 4)
	k.round()
	k.put(b.attempt(1, attemptRunning, false, 4))
	k.round()
	k.wantOutcome(k.record(b), open) // the state of the attempt from before it stalled is out of date
	k.moves(b, "", b.attempt(1, attemptRunning, false, 7))
	k.pass(6 * time.Second)
	k.round()
	k.wantOutcome(k.record(b), open)
	k.wantAsked(0)
	b.run.Step = 5
	k.moves(b, "")
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "by itself" {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(0)
}

// An operation that lasts too long as a whole has recovered when its workspace is there, whatever steps it has got
// through meanwhile.
func TestALateOperationRecoversAtItsEndAlone(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	k.joins(b)
	b.run.Step = 2
	k.moves(b, "run_stalled: not over after 00:15:00")
	k.detect()
	b.run.Step = 3
	k.moves(b, "run_stalled: not over after 00:15:00")
	k.round()
	if rec := k.record(b); rec.GetEndedAt() != nil {
		t.Fatalf("%v", rec)
	}
	k.succeed(b)
	k.round()
	k.wantOutcome(k.record(b), recovered)
}

// A stalled operation that ends failed has recovered nothing either. If a person leaves the workspace failed, the
// record ends, with the operation's failure.
func TestAStallThatEndsFailedIsNotRecovered(t *testing.T) {
	k := newKit(t)
	b := k.provision("acme", "one", byProcess)
	k.joins(b)
	k.stall(b, 5)
	k.detect()
	b.run.CancelBy, b.run.CancelRequestedAt = "user:ada", timestamppb.New(k.now())
	b.ws.State = commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING
	k.put(b.run, b.ws)
	k.round()
	k.fail(b, 5, "cancel_requested")
	k.round()
	if rec := k.record(b); rec.GetEndedAt() != nil {
		t.Fatalf("%v", rec)
	}
	k.pass(61 * time.Minute)
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, gaveUp)
	if !strings.Contains(rec.GetCause(), "cancel_requested") || rec.GetWhatWorked() != "" {
		t.Fatalf("%v", rec)
	}
	k.metric("watchdog_recoveries_ended_total", "recovered", 0)
	k.metric("watchdog_recoveries_ended_total", "failed", 1)
}

// absent returns a workspace whose instance was launched and has no session, while nodeapi listens.
func (k *kit) absent(tenant, name string) *instance {
	k.t.Helper()
	b := k.provision(tenant, name, byProcess)
	k.beat()
	k.launched(b)
	return b
}

func (k *kit) launched(b *instance) {
	k.t.Helper()
	k.put(&lifecyclev1.Instance{
		InstanceId: ids.New(), WorkspaceId: b.ws.GetWorkspaceId(), Epoch: b.ws.GetEpoch(),
		State: commonv1.InstanceState_INSTANCE_STATE_LIVE, Placement: byProcess, NodeId: ids.New(),
		StartedAt: timestamppb.New(k.now()),
	})
}

// replaces makes lifecycle answer with a new operation, which becomes the instance's: the stalled one is cancelled
// first.
func (k *kit) replaces(b *instance) {
	k.t.Helper()
	list := k.owner.asked()
	last := list[len(list)-1]
	op := k.owner.byKey[last.GetIdempotencyKey()]
	b.run.State, b.run.CancelBy, b.run.CancelRequestedAt = commonv1.RunState_RUN_STATE_FAILED, asked,
		timestamppb.New(k.now())
	b.run.FinishedAt, b.run.ErrorCode, b.run.Error = timestamppb.New(k.now()), "cancel_requested",
		"cancelled by the watchdog"
	k.moves(b, "", b.attempt(1, commonv1.AttemptState_ATTEMPT_STATE_CANCELLED, true, 9))
	b.ws.Epoch++
	k.start(b, kRecreate, op.GetOperationId(), asked, recreating)
	k.launched(b)
}

// The cause of the stall is an instance that does not come. Lifecycle replaces it by another, and the new operation is
// followed to its end.
func TestAnInstanceThatDoesNotComeIsReplaced(t *testing.T) {
	k := newKit(t)
	b := k.absent("acme", "one")
	first := b.run.GetRunId()
	k.listen(5*time.Minute + 10*time.Second)
	k.stall(b, 1)
	k.detect()
	k.wantAsked(1)
	if req := k.owner.asked()[0]; req.GetKind() != kRecreate || req.GetExpectedEpoch() != 1 {
		t.Fatalf("%v", req)
	}
	k.replaces(b)
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, open)
	if rec.GetAttempts() != 1 || rec.GetOperationId() != b.run.GetRunId() || rec.GetTrigger() != stalled ||
		b.run.GetRunId() == first {
		t.Fatalf("%v", rec)
	}
	k.listen(time.Minute)
	k.round()
	k.wantAsked(1)
	k.succeed(b)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "recreate" || rec.GetAttempts() != 1 {
		t.Fatalf("%v", rec)
	}
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record`); n != 1 {
		t.Fatalf("%d records", n)
	}
}

// The next instance does not come either: one more is requested, and then the cause counts as permanent. The last
// operation is followed to its end, which ends the record.
func TestInstancesThatDoNotComeAreNotReplacedForever(t *testing.T) {
	k := newKit(t)
	b := k.absent("acme", "one")
	for want := 1; want <= 2; want++ {
		k.listen(5*time.Minute + 10*time.Second)
		k.stall(b, 1)
		k.detect()
		k.wantAsked(want)
		k.replaces(b)
		k.round()
	}
	k.listen(5*time.Minute + 10*time.Second)
	k.stall(b, 1)
	for range 10 {
		k.listen(time.Minute)
		k.round()
	}
	k.wantAsked(2)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "2 recreations") || rec.GetEndedAt() != nil {
		t.Fatalf("%v", rec)
	}
	k.fail(b, 1, "deadline_of_step_exceeded")
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, gaveUp)
	if rec.GetErrorCode() != "deadline_of_step_exceeded" || rec.GetStep() != steps[1] {
		t.Fatalf("%v", rec)
	}
	k.wantAsked(2)
}

// After a join of an operation that is not flagged as stalled yet, the request is repeated when it is: the refused
// registers of an instance are seen long before its step counts as stalled.
func TestAJoinIsAskedAgainOnceTheInstanceIsGivenUp(t *testing.T) {
	k := newKit(t)
	b := k.absent("acme", "one")
	k.joins(b)
	b.ws.RegisterFailures, b.ws.LastErrorCode, b.ws.LastError = 3, "register_failing", "token_consumed"
	k.put(b.ws)
	k.listen(70 * time.Second)
	k.detect()
	k.wantAsked(1)
	k.listen(3 * time.Minute)
	k.round()
	k.wantAsked(1)
	k.owner.set(func() { k.owner.answer = nil })
	k.listen(2 * time.Minute)
	k.stall(b, 1)
	k.round()
	k.wantAsked(2)
	if a, b := k.owner.asked()[0].GetIdempotencyKey(), k.owner.asked()[1].GetIdempotencyKey(); a == b {
		t.Fatalf("the key of the join again: %s", a)
	}
	k.replaces(b)
	k.succeed(b)
	k.round()
	k.wantOutcome(k.record(b), recovered)
	// The join gave its tokens back.
	if n := k.count(`SELECT round(4 - tokens)::int FROM recovery.churn_bucket WHERE scope = 'workspace'`); n != 1 {
		t.Fatalf("%d tokens for one recreation", n)
	}
}

// While no replica of nodeapi listens, the absence of instances is not their failure, and no request is made until a
// replica has listened for long enough.
func TestAnInstanceIsNotReplacedWhileNoReplicaListens(t *testing.T) {
	k := newKit(t)
	b := k.absent("acme", "one")
	k.pass(6 * time.Minute)
	k.stall(b, 1)
	k.round()
	k.pass(6 * time.Second)
	k.round()
	k.wantAsked(0)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "listen") {
		t.Fatalf("%v", rec)
	}
	k.listen(time.Minute)
	k.round()
	k.wantAsked(0)
	k.listen(80 * time.Second)
	k.round()
	k.wantAsked(1)
	k.wantOutcome(k.record(b), open)
}

// Budgets, the brake and people's operations withhold this recreation like any other.
func TestAnInstanceThatDoesNotComeIsReplacedWithinItsLimits(t *testing.T) {
	t.Run("brake", func(t *testing.T) {
		k := newKit(t)
		b := k.absent("acme", "one")
		if _, err := k.db.OwnerPool().Exec(k.ctx,
			`UPDATE recovery.brake SET engaged = true, since = mesh.clock()`); err != nil {
			t.Fatal(err)
		}
		k.listen(310 * time.Second)
		k.stall(b, 1)
		k.detect()
		k.wantAsked(0)
		k.wantOutcome(k.record(b), withheld)
	})
	t.Run("budget", func(t *testing.T) {
		k := newKit(t)
		k.policySet("churn.recreates_per_hour", "1")
		b := k.absent("acme", "one")
		k.listen(310 * time.Second)
		k.stall(b, 1)
		k.detect()
		k.wantAsked(1)
		k.replaces(b)
		k.listen(310 * time.Second)
		k.stall(b, 1)
		k.detect()
		k.wantAsked(1)
		rec := k.record(b)
		k.wantOutcome(rec, withheld)
		if !strings.Contains(rec.GetWithheldBecause(), "budget") {
			t.Fatalf("%v", rec)
		}
	})
	t.Run("a person", func(t *testing.T) {
		k := newKit(t)
		b := k.absent("acme", "one")
		k.listen(310 * time.Second)
		k.stall(b, 1)
		k.round()
		b.run.CancelBy, b.run.CancelRequestedAt = "user:ada", timestamppb.New(k.now())
		b.ws.State = commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING
		k.put(b.run, b.ws)
		k.detect()
		k.fail(b, 1, "cancel_requested")
		k.detect()
		k.wantAsked(0)
	})
}
