package judge_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TestExpiredTasksAreAVerdictOnAConnectedNode checks that tasks that expired in the queue are a verdict once the node
// is back, and not while its silence says more; and that it ends with lifecycle's word.
func TestExpiredTasksAreAVerdictOnAConnectedNode(t *testing.T) {
	k := newKit(t)
	n := k.up()
	report := func(reason commonv1.DriftReason) {
		k.put(&recoveryv1.Evidence{
			NodeId: n.id(), Part: tasks, Reason: reason, Source: commonv1.EvidenceSource_EVIDENCE_SOURCE_TASKS,
			ObservedAt: timestamppb.New(k.now()), Detail: "a task expired in the queue",
		})
		k.round()
	}
	report(unspecified) // of a node without a backlog
	if rows := k.count(`SELECT count(*) FROM recovery.evidence WHERE source = 'tasks'`); rows != 0 {
		t.Errorf("%d rows", rows)
	}
	k.listen(10 * time.Second)
	k.lose(n)
	k.listen(staleAfter + time.Second)
	k.round()
	k.put()
	report(backlog)
	k.wantReasons(n.id(), agentDown)
	k.back(n)
	k.round()
	v := k.wantReasons(n.id(), agentDown, backlog)
	if v.GetSeverity() != p2 || v.GetUserState() != temporary || v.GetOwner() != "lifecycle" {
		t.Errorf("verdict %v", v)
	}
	report(commonv1.DriftReason(4711)) // of a newer build
	k.wantReasons(n.id(), agentDown, backlog)
	report(unspecified)
	k.wantReasons(n.id(), agentDown, backlog, unspecified)
	// One whose end was never read, as by a replica of a build without it, ends by itself.
	report(backlog)
	k.pass(25*time.Hour + time.Second)
	k.beat()
	k.put()
	k.round()
	if v := k.last(n); v.GetReason() != unspecified || v.GetEnded().GetReason() != backlog {
		t.Errorf("verdict %v", v)
	}
}
