package authority

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// A view that is never replaced drops retired nodes after their term, and no other node.
func TestRetiredNodesAreForgotten(t *testing.T) {
	const (
		active  = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE
		retired = commonv1.NodeIdentityState_NODE_IDENTITY_STATE_RETIRED
	)
	node := func(id string, state commonv1.NodeIdentityState, sequence int64) *recoveryv1.NodeAuthority {
		return &recoveryv1.NodeAuthority{NodeId: id, State: state, Sequence: sequence}
	}
	synctest.Test(t, func(t *testing.T) {
		v := New(slog.New(slog.DiscardHandler), Config{}, nil, func(*recoveryv1.NodeAuthority) {})
		v.replace(map[string]*recoveryv1.NodeAuthority{
			"a": node("a", active, 1), "gone": node("gone", retired, 2), "b": node("b", active, 3),
		}, 3)
		time.Sleep(time.Hour)
		v.apply(node("b", retired, 4))
		v.apply(node("b", retired, 5)) // it does not begin its term anew
		know := func(want ...string) {
			t.Helper()
			for _, id := range []string{"a", "b", "c", "gone"} {
				wanted := false
				for _, w := range want {
					wanted = wanted || w == id
				}
				if got := v.Get(id) != nil; got != wanted {
					t.Errorf("after %s node %s is known: %t, want %t", time.Since(v.start), id, got, wanted)
				}
			}
		}
		know("a", "b", "gone")
		time.Sleep(48*time.Hour + time.Minute)
		v.apply(node("c", active, 6))
		know("a", "b", "c")
		time.Sleep(time.Hour)
		v.apply(node("c", active, 7))
		know("a", "c")
		if len(v.retired) != 0 {
			t.Errorf("%d retired nodes are still noted", len(v.retired))
		}
	})
}
