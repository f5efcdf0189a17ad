package roster

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// A node whose state this build does not know has no session, and is told to come again.
func TestAnUnknownStateWaits(t *testing.T) {
	for _, state := range []commonv1.NodeIdentityState{commonv1.NodeIdentityState_NODE_IDENTITY_STATE_UNSPECIFIED, 99} {
		d := stateDenial(&recoveryv1.NodeAuthority{State: state})
		if d.GetReason() != commonv1.Reason_REASON_RECORD_UNREADABLE || d.GetAction() != commonv1.Action_ACTION_WAIT ||
			d.GetRetryAfter().AsDuration() <= 0 {
			t.Errorf("state %d: %v", state, d)
		}
	}
	if d := stateDenial(
		&recoveryv1.NodeAuthority{State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE},
	); d != nil {
		t.Errorf("an active node: %v", d)
	}
}
