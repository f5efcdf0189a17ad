package roster

import (
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TestASessionFromBeforeAFenceEnds: a node was fenced and reactivated before this replica heard of the fence. Its
// session does not count any more, and is offered no work: it ends, and the agent opens another one.
func TestASessionFromBeforeAFenceEnds(t *testing.T) {
	in(t, Config{}, func(r *Roster, _ *facts) {
		s, w := admitted(r, nil)
		decided := &recoveryv1.NodeAuthority{
			NodeId: "node", NodeInstanceId: "instance", State: commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE,
			CurrentSerial: "1", Issued: 1, Confirmed: 1, ConfirmedSessionId: "session",
		}
		r.OnAuthority(decided)
		time.Sleep(time.Second)
		if w.isClosed() {
			t.Error("a session that counts was closed")
		}
		decided.ConfirmedSessionId = ""
		r.OnAuthority(decided)
		time.Sleep(2 * time.Second)
		if got := w.last().GetDenied().GetReason(); !w.isClosed() || got != commonv1.Reason_REASON_SESSION_UNKNOWN {
			t.Errorf("a session that a decision ended: closed %t, because of %s", w.isClosed(), got)
		}
		r.Remove(s)
	})
}
