package fault_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/fault"
)

// TestNear: a code with a letter wrong, in other spelling or in part is found; what is like no code finds none.
func TestNear(t *testing.T) {
	for text, want := range map[string]string{
		"agent-down": "agent_down", "Agent Down": "agent_down", "certifcate_expired": "certificate_expired",
		"stalled": "run_stalled", "identity_revoked": "identity_revoked", "clock_skewd": "clock_skew",
	} {
		if got := fault.Near(text); !slices.Contains(got, want) || len(got) > 3 {
			t.Errorf("near %q: %q, want %q among them", text, got, want)
		}
	}
	for _, text := range []string{"", "bogus", "xyzzy", strings.Repeat("agent_down", 100)} {
		if got := fault.Near(text); len(got) != 0 {
			t.Errorf("near %q: %q", text, got)
		}
	}
}
