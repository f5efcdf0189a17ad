package watchdog_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestSilenceIsAsLongAsThePolicySays: an instance that is silent for six minutes needs a recovery by default, and none
// while the key allows ten.
func TestSilenceIsAsLongAsThePolicySays(t *testing.T) {
	for value, opened := range map[string]int{"": 1, "600": 0} {
		k := newKit(t)
		if value != "" {
			k.policySet(policy.HeartbeatStaleAfterSeconds, value)
		}
		b := k.up("acme", "one", byProcess, ids.New())
		k.lose(b)
		k.listen(6 * time.Minute)
		if out := k.round(); out.Opened != opened {
			t.Errorf("with %q: %d recoveries, want %d", value, out.Opened, opened)
		}
	}
}
