package client_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestAWeakeningIsAcknowledgedByFlags: the refusal of a weaker value names the flags that accept it, and the flags are
// sent with the reason.
func TestAWeakeningIsAcknowledgedByFlags(t *testing.T) {
	f := mesh(t)
	stock(f)
	weaken := []string{"policy", "set", policy.BudgetP0DetectSeconds, "120"}
	refuse(f, "SetPolicy", policy.Defaults().Validate(policy.BudgetP0DetectSeconds, "120", policy.Ack{}))
	got := call(t, weaken...)
	code := "error: policy_weakening_unacknowledged: " + policy.BudgetP0DetectSeconds
	if got.code == 0 || !strings.HasPrefix(got.err, code) ||
		!strings.Contains(got.err, "--acknowledge-weakening --reason") {
		t.Errorf("exit %d, %s", got.code, got.err)
	}
	if fault.RowOf(commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED).Remedy == "" {
		t.Error("the refusal has no next action")
	}
	stock(f)
	call(t, append(weaken, "--acknowledge-weakening", "--reason", "the site moves")...).wants(t, 0)
	sets := sent[*readmodelv1.SetPolicyRequest](f)
	if len(sets) != 2 || sets[0].GetAcknowledgeWeakening() || !sets[1].GetAcknowledgeWeakening() ||
		sets[1].GetReason() != "the site moves" || sets[1].GetValue() != "120" {
		t.Errorf("sent %v", sets)
	}
	help := call(t, "policy", "set", "--help").wants(t, 0).out
	for _, want := range []string{"tightened freely", "--acknowledge-weakening", "audit log", "--reason"} {
		if !strings.Contains(help, want) {
			t.Errorf("the help does not say %q:\n%s", want, help)
		}
	}
}
