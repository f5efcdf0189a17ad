package plans_test

import (
	"testing"

	"github.com/gpuaas/mesh/mesh/plans"
	"github.com/gpuaas/mesh/services/lifecycle/findings"
)

// TestPagesAreThoseOfTheSweep: what is measured of a page is of one as large as the sweep of findings reads.
func TestPagesAreThoseOfTheSweep(t *testing.T) {
	if page := findings.Default().Page; page != plans.PageSize {
		t.Errorf("the sweep of findings reads pages of %d, and pages of %d are measured", page, plans.PageSize)
	}
}
