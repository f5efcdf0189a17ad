package watch_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// judge appends a verdict about a node, or about the control plane if the node is empty.
func (k *kit) judge(node string, reason commonv1.DriftReason) {
	k.t.Helper()
	k.Append(&recoveryv1.NodeVerdict{NodeId: node, Reason: reason, DetectedAt: timestamppb.New(k.Now())})
}

// Scenario: recovery judges a node. That is a change of the node, with the verdict for people of the operator and
// without it for those of its tenant.
func TestAVerdictIsAChangeOfItsNode(t *testing.T) {
	k := newKit(t, watch.Config{Interval: time.Millisecond}, true)
	topics := []readmodelv1.Topic{readmodelv1.Topic_TOPIC_NODES}
	scope, err := list.ScopeOf(rpc.Person{Subject: "p", TenantID: k.A.ID, Roles: []string{"viewer"}})
	k.check(err)
	operator := k.watch(watch.Request{Filter: watch.Filter{Scope: list.All(), Topics: topics}}, nil)
	tenant := k.watch(watch.Request{Filter: watch.Filter{Scope: scope, Topics: topics}}, nil)
	operator.bootstrapped()
	tenant.bootstrapped()
	k.judge(k.A.NodeID, commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE)
	k.sync()
	changed := func(f *readmodelv1.WatchResponse) bool {
		return f.GetItem().GetChange() == readmodelv1.Change_CHANGE_UPDATED && f.GetItem().GetId() == k.A.NodeID
	}
	got := operator.until("verdict", changed).GetItem().GetNode()
	if got.GetVerdict().GetReason() != commonv1.DriftReason_DRIFT_REASON_TOKEN_REUSE {
		t.Errorf("people of the operator see %v", got)
	}
	if got := tenant.until("its node", changed).GetItem().GetNode(); got.GetVerdict() != nil || got.GetName() == "" {
		t.Errorf("a person of the tenant sees %v", got)
	}
}
