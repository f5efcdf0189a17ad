package watchdog_test

import (
	"context"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
)

// unanswered is an instance without session whose recreation was asked for while lifecycle could not be reached.
func (k *kit) unanswered(tenant, name string, where commonv1.PlacementDriver) *instance {
	k.t.Helper()
	b := k.up(tenant, name, where, ids.New())
	k.owner.set(func() {
		k.owner.answer = func(*lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			return nil, context.DeadlineExceeded
		}
	})
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(1)
	k.owner.set(func() { k.owner.answer = nil })
	return b
}

// wantWithdrawn requires that no request was sent again, and that the tokens were returned to the budgets.
func (k *kit) wantWithdrawn() {
	k.t.Helper()
	k.wantAsked(1)
	if n := k.count(`SELECT count(*) FROM recovery.churn_bucket b
		WHERE b.scope = 'workspace' AND b.tokens < 3.99`); n != 0 {
		k.t.Fatal("the request that was withdrawn has not given its token back")
	}
	if n := k.count(`SELECT count(*) FROM recovery.recovery_record WHERE asked <> answered`); n != 0 {
		k.t.Fatalf("%d records still want an answer", n)
	}
}

func TestUnansweredRequestIsWithdrawnWhenTheInstanceServesAgain(t *testing.T) {
	k := newKit(t)
	b := k.unanswered("acme", "one", byProcess)
	k.back(b)
	k.listen(time.Minute)
	k.round()
	rec := k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "by itself" || rec.GetAttempts() != 0 {
		t.Fatalf("%v", rec)
	}
	k.listen(time.Minute)
	k.round()
	k.wantWithdrawn()
}

// A person recreates or cancels while the request is not answered: from then on that person decides about the
// workspace.
func TestUnansweredRequestIsWithdrawnForAPerson(t *testing.T) {
	for _, cancels := range []bool{true, false} {
		k := newKit(t)
		b := k.unanswered("acme", "one", byProcess)
		b.ws.Epoch = 2
		k.start(b, kRecreate, ids.New(), "user:ada", recreating)
		if cancels {
			b.run.CancelBy, b.run.CancelRequestedAt = "user:ada", b.run.GetCreatedAt()
			b.ws.State = commonv1.WorkspaceState_WORKSPACE_STATE_CANCELLING
			k.put(b.run, b.ws)
		}
		for range 3 {
			k.listen(time.Minute)
			k.round()
		}
		k.wantWithdrawn()
		if rec := k.record(b); rec.GetTrigger() != manual || rec.GetEndedAt() != nil {
			t.Fatalf("cancels %v: %v", cancels, rec)
		}
		if cancels {
			k.wantOutcome(k.record(b), withheld)
		}
	}
}

// A cause that withholds a new request withholds the repetition of one too, until the cause has passed.
func TestUnansweredRequestIsWithheldLikeANewOne(t *testing.T) {
	const sql = `UPDATE recovery.brake SET engaged = $1, since = mesh.clock()`
	k := newKit(t)
	b := k.unanswered("acme", "one", byProcess)
	if _, err := k.db.OwnerPool().Exec(k.ctx, sql, true); err != nil {
		t.Fatal(err)
	}
	k.listen(time.Minute)
	k.round()
	k.wantAsked(1)
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "brake") {
		t.Fatalf("%v", rec)
	}
	if _, err := k.db.OwnerPool().Exec(k.ctx, sql, false); err != nil {
		t.Fatal(err)
	}
	k.listen(10 * time.Second)
	k.round()
	k.wantAsked(2)
	if list := k.owner.asked(); list[0].GetIdempotencyKey() != list[1].GetIdempotencyKey() {
		t.Fatalf("another key: %v", list)
	}
	k.wantOutcome(k.record(b), open)
}

// If the operation of an unanswered request has been seen, the request is sent again under its key even while the brake
// is engaged: that starts nothing, and returns the operation.
func TestUnansweredRequestThatWasServedIsReplayed(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.owner.set(func() { k.owner.after = func() error { return context.DeadlineExceeded } })
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	k.wantAsked(1)
	first := k.owner.asked()[0]
	b.ws.Epoch = 2
	k.start(b, kRecreate, k.owner.byKey[first.GetIdempotencyKey()].GetOperationId(), asked, recreating)
	k.owner.set(func() { k.owner.after = nil })
	k.listen(20 * time.Second)
	k.round()
	k.wantAsked(2)
	again := k.owner.asked()[1]
	if again.GetIdempotencyKey() != first.GetIdempotencyKey() || first.GetExpectedEpoch() != 1 ||
		again.GetExpectedEpoch() != 1 {
		t.Fatalf("%v and then %v", first, again)
	}
	rec := k.record(b)
	if rec.GetOperationId() != b.run.GetRunId() || rec.GetAttempts() != 1 {
		t.Fatalf("%v", rec)
	}
}

// Lifecycle has another epoch than the one that was evaluated: that is no failure, and the present instance is
// evaluated by its own events.
func TestAnotherWasQuicker(t *testing.T) {
	k := newKit(t)
	b := k.up("acme", "one", byProcess, ids.New())
	k.owner.set(func() {
		k.owner.answer = func(r *lifecyclev1.RequestOperationRequest) (*lifecyclev1.Operation, error) {
			if r.GetExpectedEpoch() == 1 {
				return nil, fault.New(commonv1.Reason_REASON_CONFLICT, "asked of epoch 1, and it is in epoch 2")
			}
			return &lifecyclev1.Operation{OperationId: ids.New(), WorkspaceId: r.GetWorkspaceId(), Kind: kRecreate, Epoch: 3},
				nil
		}
	})
	k.lose(b)
	k.listen(130 * time.Second)
	k.detect()
	rec := k.record(b)
	k.wantOutcome(rec, withheld)
	if !strings.Contains(rec.GetWithheldBecause(), "another request came first") ||
		!strings.Contains(rec.GetWithheldBecause(), "epoch 2") {
		t.Fatalf("%v", rec)
	}
	k.wantWithdrawn()
	b.ws.Epoch = 2
	k.start(b, kRecreate, ids.New(), "user:ada", recreating)
	k.back(b)
	k.succeed(b)
	k.listen(time.Minute)
	k.round()
	rec = k.record(b)
	k.wantOutcome(rec, recovered)
	if rec.GetWhatWorked() != "recreate" {
		t.Fatalf("%v", rec)
	}
	k.wantWithdrawn()
}
