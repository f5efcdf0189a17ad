package policy

import "slices"

// Budgets returns the rows in the order of the matrix.
func Budgets() []Budget { return slices.Clone(budgets) }
