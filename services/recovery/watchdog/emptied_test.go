package watchdog_test

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
)

const emptied = commonv1.RecoveryTrigger_RECOVERY_TRIGGER_NODE_EMPTIED

// emptiedBy returns the finding that the machine of a workspace has nothing of it.
func (k *kit) emptiedBy(b *instance) *lifecyclev1.Finding {
	k.t.Helper()
	return &lifecyclev1.Finding{
		FindingId: ids.New(), Kind: commonv1.FindingKind_FINDING_KIND_CLAIM_WITHOUT_RESOURCE, SubjectType: "claim",
		WorkspaceId: b.ws.GetWorkspaceId(), NodeId: b.ws.GetNodeId(), Emptied: true, FirstSeenAt: timestamppb.New(k.now()),
	}
}

// TestWhatAMachineCameBackWithoutIsRecreated: once, as auto_recovery, when lifecycle's finding says that the connected
// machine has nothing of the workspace; and once more only if that is found again after the recreation.
func TestWhatAMachineCameBackWithoutIsRecreated(t *testing.T) {
	k := newKit(t)
	b, other := k.up("acme", "one", byStatic, ids.New()), k.up("acme", "two", byStatic, ids.New())
	k.pass(time.Minute)
	k.beat()
	found := k.emptiedBy(b)
	k.put(found, found)
	k.detect()
	k.wantAsked(1)
	req := k.owner.asked()[0]
	if req.GetRequester() != "auto_recovery" || req.GetWorkspaceId() != b.ws.GetWorkspaceId() ||
		req.GetKind() != commonv1.OperationKind_OPERATION_KIND_RECREATE {
		t.Fatalf("lifecycle was asked %v", req)
	}
	if rec := k.record(b); rec.GetTrigger() != emptied {
		t.Errorf("record %v", rec)
	}
	b.ws.Epoch = 2
	k.start(b, commonv1.OperationKind_OPERATION_KIND_RECREATE, k.record(b).GetOperationId(), "auto_recovery:recovery",
		recreating)
	k.succeed(b)
	k.detect() // the finding of the former claims is still open
	k.wantOutcome(k.record(b), commonv1.RecoveryOutcome_RECOVERY_OUTCOME_RECOVERED)
	if rec := k.record(b); rec.GetTrigger() != emptied {
		t.Errorf("a recreation of our own counts as a person's: %v", rec)
	}
	k.wantAsked(1)
	found.ResolvedAt = timestamppb.New(k.now())
	k.put(found)
	if n := k.count(`SELECT count(*) FROM recovery.watch_emptied`); n != 0 {
		t.Errorf("%d rows of findings that are resolved", n)
	}
	k.pass(time.Minute)
	k.beat()
	k.put(k.emptiedBy(b))
	k.detect()
	k.wantAsked(2)
	for _, req := range k.owner.asked() {
		if req.GetWorkspaceId() == other.ws.GetWorkspaceId() {
			t.Errorf("the other machine's workspace was recreated")
		}
	}
}

// TestWhatProvesNoEmptiedMachine: each of these findings leaves the workspace as it is.
func TestWhatProvesNoEmptiedMachine(t *testing.T) {
	for name, c := range map[string]struct {
		change func(k *kit, b *instance, f *lifecyclev1.Finding)
		where  commonv1.PlacementDriver
	}{
		"something is left":  {change: func(_ *kit, _ *instance, f *lifecyclev1.Finding) { f.Emptied = false }},
		"of another machine": {change: func(_ *kit, _ *instance, f *lifecyclev1.Finding) { f.NodeId = ids.New() }},
		"from before the workspace became active": {change: func(_ *kit, b *instance, f *lifecyclev1.Finding) {
			f.FirstSeenAt = timestamppb.New(b.ws.GetStateAt().AsTime().Add(-time.Second))
		}},
		"the machine is not heard": {change: func(k *kit, b *instance, _ *lifecyclev1.Finding) { k.lose(b) }},
		"an instance of its own":   {where: byProcess, change: func(*kit, *instance, *lifecyclev1.Finding) {}},
		"of another kind": {change: func(_ *kit, _ *instance, f *lifecyclev1.Finding) {
			f.Kind = commonv1.FindingKind_FINDING_KIND_RESOURCE_WITHOUT_CLAIM
		}},
		"resolved": {change: func(k *kit, _ *instance, f *lifecyclev1.Finding) {
			k.put(f)
			f.ResolvedAt = timestamppb.New(k.now())
		}},
		"automatic recovery is off": {change: func(k *kit, _ *instance, _ *lifecyclev1.Finding) {
			k.policySet(policy.AutoRecovery, "false")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(t)
			where := c.where
			if where == 0 {
				where = byStatic
			}
			b := k.up("acme", "one", where, ids.New())
			k.pass(time.Minute)
			k.beat()
			f := k.emptiedBy(b)
			c.change(k, b, f)
			k.put(f)
			k.detect()
			k.wantAsked(0)
		})
	}
}
