package plans_test

import (
	"testing"

	"github.com/gpuaas/mesh/mesh/plans"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
)

// TestPagesAreThoseOfTheSweep: the measured pages are as large as those that the sweep of findings reads.
func TestPagesAreThoseOfTheSweep(t *testing.T) {
	if page := findings.Default().Page; page != plans.PageSize {
		t.Errorf("the sweep of findings reads pages of %d, and pages of %d are measured", page, plans.PageSize)
	}
}
