package policy

import (
	"slices"
	"time"
)

// Budgets returns the rows in the order of the matrix.
func Budgets() []Budget { return slices.Clone(budgets) }

// BudgetWithin returns the state's budget under a policy, zero for a terminal state.
func (r StateRow) BudgetWithin(s Set) time.Duration {
	if r.BudgetKey != "" {
		return s.Duration(r.BudgetKey)
	}
	return r.Budget
}
