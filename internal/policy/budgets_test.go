package policy_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
)

// TestBudgetsAreTightenedFreely checks that a budget of each severity may be tightened, and is weakened only with an
// acknowledged reason.
func TestBudgetsAreTightenedFreely(t *testing.T) {
	for key, values := range map[string][2]string{
		policy.BudgetP0DetectSeconds: {"30", "61"}, policy.BudgetP0RecoverSeconds: {"60", "901"},
		policy.BudgetP1DetectSeconds: {"30", "301"}, policy.BudgetP1RecoverSeconds: {"60", "3601"},
		policy.BudgetP2DetectSeconds: {"30", "1801"}, policy.BudgetP2RecoverSeconds: {"60", "86401"},
	} {
		if err := policy.Defaults().Validate(key, values[0], policy.Ack{}); err != nil {
			t.Errorf("%s tightened: %v", key, err)
		}
		err := policy.Defaults().Validate(key, values[1], policy.Ack{Weakening: true})
		if fault.ReasonOf(err) != commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED {
			t.Errorf("%s weakened without a reason: %v", key, err)
		}
		if err := policy.Defaults().Validate(key, values[1], policy.Ack{Weakening: true, Reason: "a move"}); err != nil {
			t.Errorf("%s weakened with a reason: %v", key, err)
		}
	}
}

// TestEachBudgetFollowsItsKey checks that no row of the matrix is slower than a key that was tightened, and that a key
// that was weakened makes no row that is tighter than its severity slower.
func TestEachBudgetFollowsItsKey(t *testing.T) {
	tight, err := policy.NewSet(map[string]string{
		policy.BudgetP0DetectSeconds: "7", policy.BudgetP1DetectSeconds: "7", policy.BudgetP2DetectSeconds: "7",
		policy.BudgetP0RecoverSeconds: "9", policy.BudgetP1RecoverSeconds: "9", policy.BudgetP2RecoverSeconds: "9",
	})
	if err != nil {
		t.Fatal(err)
	}
	weak, err := policy.NewSet(map[string]string{
		policy.BudgetP0DetectSeconds: "600", policy.BudgetP1DetectSeconds: "3000", policy.BudgetP2DetectSeconds: "18000",
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range policy.Budgets() {
		own := tight.Duration(b.DetectKey)
		if b.DetectWithin(tight)-own > 7e9 || b.RecoverUnder(tight) > 9e9 {
			t.Errorf("%s: detect within %s, recover within %s", b.Name, b.DetectWithin(tight), b.RecoverUnder(tight))
		}
		if b.DetectWithin(policy.Defaults())-own != b.Detect || b.RecoverUnder(policy.Defaults()) != b.RecoverWithin() {
			t.Errorf("%s: detect within %s by default", b.Name, b.DetectWithin(policy.Defaults()))
		}
		if b.Detect < b.Severity.Detect() && b.DetectWithin(weak)-own != b.Detect {
			t.Errorf("%s: detect within %s under weaker keys", b.Name, b.DetectWithin(weak))
		}
	}
}
