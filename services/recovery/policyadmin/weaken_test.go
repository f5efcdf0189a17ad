package policyadmin_test

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestBudgetsAreWeakenedWithAReasonThatIsAudited: a budget of each severity is tightened without words; it is not
// weakened without an acknowledged reason, and the audit log has that reason, the person and both values.
func TestBudgetsAreWeakenedWithAReasonThatIsAudited(t *testing.T) {
	d := newDesk(t)
	for _, c := range []struct{ key, before, tight, weak string }{
		{policy.BudgetP0DetectSeconds, "60", "30", "61"},
		{policy.BudgetP0RecoverSeconds, "900", "600", "901"},
		{policy.BudgetP1DetectSeconds, "300", "200", "301"},
		{policy.BudgetP1RecoverSeconds, "3600", "600", "3601"},
		{policy.BudgetP2DetectSeconds, "1800", "900", "1801"},
		{policy.BudgetP2RecoverSeconds, "86400", "600", "86401"},
	} {
		_, err := d.set(c.key, c.weak)
		f, ok := fault.As(err)
		if !ok || f.Reason != commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED ||
			!strings.Contains(f.Remedy, "--acknowledge-weakening --reason") || len(f.Unmet) == 0 ||
			!strings.Contains(f.Public, c.before) {
			t.Errorf("%s weakened without a word: %v", c.key, err)
		}
		if got := d.get(c.key); got.GetOverridden() {
			t.Errorf("a refusal changed %v", got)
		}
		if _, err := d.set(c.key, c.tight); err != nil {
			t.Errorf("%s tightened: %v", c.key, err)
		}
		out, err := d.server.SetPolicy(d.ctx, &recoveryv1.SetPolicyRequest{
			Key: c.key, Value: c.weak, AcknowledgeWeakening: true, Reason: "the site moves",
		})
		if err != nil || out.GetKey().GetReason() != "the site moves" {
			t.Errorf("%s weakened with a reason: %v, %v", c.key, out, err)
		}
		var kept []string
		for _, e := range testkit.Events(t, d.db.Pool(pg.RoleRecovery), `kind = '`+audit.Kind+`'`) {
			entry := &commonv1.AuditEntry{}
			if err := e.Decode(entry); err != nil {
				t.Fatal(err)
			}
			if entry.GetSubjectId() != c.key {
				continue
			}
			details := entry.GetDetails().GetFields()
			kept = append(kept, strings.Join([]string{
				entry.GetAction(), entry.GetActor(), entry.GetReason(), details["before"].GetStringValue(),
				details["value"].GetStringValue(), map[bool]string{true: "weakens"}[details["weakens"].GetBoolValue()],
			}, ","))
		}
		want := []string{
			"policy.set,ann,," + c.before + "," + c.tight + ",",
			"policy.set,ann,the site moves," + c.tight + "," + c.weak + ",weakens",
		}
		if strings.Join(kept, "; ") != strings.Join(want, "; ") {
			t.Errorf("%s: the audit log has %q, want %q", c.key, kept, want)
		}
	}
}
