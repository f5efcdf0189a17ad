package drift

import "github.com/gpuaas/mesh/internal/policy"

// Under returns the verdict with the budgets that its reason has under a policy. Where a person decides on the recovery
// it has none under any.
func (v Verdict) Under(set policy.Set) Verdict {
	row, ok := RowOf(v.Reason)
	if !ok {
		return v
	}
	budget, _ := policy.BudgetOf(row.Drill)
	v.DetectWithin = budget.DetectWithin(set)
	if v.RecoverWithin != 0 {
		v.RecoverWithin = budget.RecoverUnder(set)
	}
	return v
}
