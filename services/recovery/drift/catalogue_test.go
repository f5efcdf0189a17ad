package drift_test

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// TestTheCatalogueHasEveryReason checks that there is one whole row for each reason.
func TestTheCatalogueHasEveryReason(t *testing.T) {
	all := names.All[commonv1.DriftReason]()
	catalogue := drift.Catalogue()
	if len(catalogue) != len(all) {
		t.Fatalf("%d rows for %d reasons", len(catalogue), len(all))
	}
	for i, reason := range all {
		row, ok := drift.RowOf(reason)
		if !ok || row.Reason != reason || catalogue[i] != row {
			t.Fatalf("row of %s: %+v, in the catalogue %+v", names.Of(reason), row, catalogue[i])
		}
		if row.UserState == 0 || row.Severity == 0 || row.Owner == "" || row.NextAction == "" || row.DetectWithin <= 0 ||
			row.RecoverWithin <= 0 {
			t.Errorf("row of %s: %+v", names.Of(reason), row)
		}
	}
	for _, reason := range []commonv1.DriftReason{-1, 0, 4711} {
		if row, ok := drift.RowOf(reason); ok {
			t.Errorf("row of %d: %+v", reason, row)
		}
	}
}
