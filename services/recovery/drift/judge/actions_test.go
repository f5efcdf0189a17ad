package judge_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/actions"
)

// actions returns the actions of a node, the newest first.
func (k *kit) actions(n *machine) []*recoveryv1.RecoveryAction {
	k.t.Helper()
	answer, err := actions.NewServer(k.db.Pool(pg.RoleRecovery)).ListActions(k.ctx,
		&recoveryv1.ListActionsRequest{NodeId: n.id()})
	k.must(err)
	return answer.GetItems()
}

// Scenario: two clients that claim to be a node are refused at once, and two replicas of recovery judge at once: that
// is one action. The node comes back with the certificate that it had, and the action ends when it is proven healthy.
func TestRefusalsAtOnceAreOneActionThatTheReturnEnds(t *testing.T) {
	k := newKit(t)
	n := k.up()
	k.tokened(n)
	k.listen(10 * time.Second)
	k.lose(n)
	k.listen(5 * time.Second)
	first, second := k.refusal(n.id(), expired), k.refusal(n.id(), invalid)
	k.put(first, second)
	other := k.another()
	var both sync.WaitGroup
	for _, judge := range []func() error{
		func() error { _, err := k.judge.RunOnce(k.ctx); return err },
		func() error { _, err := other.RunOnce(k.ctx); return err },
	} {
		both.Go(func() {
			if err := judge(); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	k.round()
	list := k.actions(n)
	if len(list) != 1 || list[0].GetState() != actions.StateOpen || list[0].GetCorrelationId() != first.GetRejectionId() ||
		!list[0].GetFirstRejectedAt().AsTime().Equal(first.GetFirstSeenAt().AsTime()) ||
		list[0].GetFailsAt().AsTime().Sub(list[0].GetBegunAt().AsTime()) != time.Hour {
		t.Fatalf("%v", list)
	}
	if v := k.last(n); v.GetCorrelationId() != first.GetRejectionId() {
		t.Errorf("the verdict has correlation %s", v.GetCorrelationId())
	}
	k.put(k.refusal(n.id(), expired)) // it goes on
	k.round()
	k.back(n)
	k.round()
	if list := k.actions(n); len(list) != 1 || list[0].GetState() != actions.StateOpen {
		t.Fatalf("before the node is proven healthy: %v", list)
	}
	k.recover(n)
	list = k.actions(n)
	if len(list) != 1 || list[0].GetState() != actions.StateSucceeded || list[0].GetEffectAt() != nil ||
		list[0].GetHealthyAt() == nil || !strings.Contains(list[0].GetOutcome(), "the certificate that it had") {
		t.Errorf("%v", list)
	}
	if v := k.last(n); v.GetHealthySince() == nil || v.GetCorrelationId() != first.GetRejectionId() {
		t.Errorf("the healthy verdict has correlation %s", v.GetCorrelationId())
	}
	before := k.count(`SELECT count(*) FROM events.event WHERE kind = 'recovery_action.changed'`)
	k.listen(time.Minute)
	k.round()
	if after := k.count(`SELECT count(*) FROM events.event WHERE kind = 'recovery_action.changed'`); after != before ||
		before != 2 {
		t.Errorf("%d events, and %d after a while", before, after)
	}
}

// A node that is merely silent, or whose token is missing, does nothing by itself, so that no action is open.
func TestWhatTheNodeCannotDoByItselfIsNoAction(t *testing.T) {
	k := newKit(t)
	silent, tokenless := k.up(), k.up()
	k.listen(10 * time.Second)
	k.lose(silent)
	k.lose(tokenless)
	k.put(k.refusal(tokenless.id(), expired))
	k.listen(staleAfter + time.Second)
	k.put()
	k.round()
	if v := k.last(tokenless); v.GetReason() != commonv1.DriftReason_DRIFT_REASON_RECOVERY_TOKEN_MISSING {
		t.Fatalf("verdict %v", v)
	}
	if list := append(k.actions(silent), k.actions(tokenless)...); len(list) != 0 {
		t.Errorf("%v", list)
	}
}

// Scenario: lifecycle's sweep makes the expired tasks of a node history. That is an action from the verdict until
// lifecycle has none.
func TestTheSweepOfStaleTasksIsAnAction(t *testing.T) {
	k := newKit(t)
	n := k.up()
	report := func(reason commonv1.DriftReason) {
		k.put(&recoveryv1.Evidence{
			NodeId: n.id(), Part: tasks, Reason: reason, Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS,
			ObservedAt: timestamppb.New(k.now()), Detail: "a task expired in the queue",
		})
		k.round()
	}
	report(backlog)
	list := k.actions(n)
	if len(list) != 1 || list[0].GetKind() != actions.StaleTaskSweep || list[0].GetState() != actions.StateOpen ||
		list[0].GetRequester() != "lifecycle" || list[0].GetFirstRejectedAt() != nil || list[0].GetCorrelationId() == "" {
		t.Fatalf("%v", list)
	}
	report(unspecified)
	if list := k.actions(n); len(list) != 1 || list[0].GetState() != actions.StateSucceeded {
		t.Errorf("%v", list)
	}
	report(backlog)
	if list := k.actions(n); len(list) != 2 || list[0].GetState() != actions.StateOpen {
		t.Errorf("the next one: %v", list)
	}
}
