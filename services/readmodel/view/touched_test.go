package view_test

import (
	"context"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// TestAWorkspaceAndItsRepairAgree: what a tenant is shown of an active workspace, and whether it is told to wait for a
// repair, follow from the same evidence, whatever the verdict on the node is named after. Evidence that is over does
// not count.
func TestAWorkspaceAndItsRepairAgree(t *testing.T) {
	k := newKit(t)
	const (
		normal, byPeople = commonv1.UserState_USER_STATE_NORMAL, commonv1.UserState_USER_STATE_OPERATOR_ACTION_REQUIRED
		bySecurity       = commonv1.UserState_USER_STATE_SECURITY_ACTION_REQUIRED
		full, skew       = commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW
		expired          = commonv1.DriftReason_DRIFT_REASON_CERT_EXPIRED
	)
	version := int64(0)
	for _, state := range []commonv1.WorkspaceState{
		commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, commonv1.WorkspaceState_WORKSPACE_STATE_PROVISIONING,
	} {
		k.Append(&lifecyclev1.Workspace{
			WorkspaceId: k.A.WorkspaceID, TenantId: k.A.ID, Tenant: k.A.Name, Name: k.A.WorkspaceName, State: state,
			Epoch: 1, NodeId: k.A.NodeID, NodeName: k.A.NodeName,
		})
		for name, c := range map[string]struct {
			reason   commonv1.DriftReason
			evidence []*recoveryv1.Evidence
			want     commonv1.UserState
		}{
			"untouched, though people must repair the node": {reason: skew, want: normal},
			"touched by its reason":                         {reason: cloned, want: bySecurity},
			"touched by evidence": {
				expired, []*recoveryv1.Evidence{{Reason: expired}, {Reason: full}, {Part: 1}}, byPeople,
			},
			"by evidence that holds": {
				expired, []*recoveryv1.Evidence{{
					Reason: full, FreshUntil: timestamppb.New(k.Now().Add(time.Hour)),
				}}, byPeople,
			},
			"by evidence that is over": {
				expired, []*recoveryv1.Evidence{{
					Reason: full, FreshUntil: timestamppb.New(k.Now().Add(-time.Minute)),
				}}, normal,
			},
		} {
			version++
			k.AppendVersion(&recoveryv1.NodeVerdict{
				NodeId: k.A.NodeID, Reason: c.reason, Evidence: c.evidence, Version: version,
				UserState: bySecurity, DetectedAt: timestamppb.New(k.Now()),
			}, version)
			k.sync()
			var target view.Target
			err := k.read(scopeOf(t, k.A.ID), func(ctx context.Context, s *view.Snapshot) (err error) {
				target, err = s.Target(ctx, k.A.WorkspaceID)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := target.Workspace.GetUserState(); state == commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE && got != c.want {
				t.Errorf("%s: shown as %s", name, names.Of(got))
			}
			if waits := target.Repair.AskAgain > 0; waits != (c.want != normal) || waits && target.Repair.State != c.want {
				t.Errorf("%s, %s: the repair is %+v", name, names.Of(state), target.Repair)
			}
		}
	}
}
