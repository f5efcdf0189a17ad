package rollback

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Evidence of a kind that this build does not know is shown with its other fields, and reported.
func TestEvidenceOfANewerKindIsReported(t *testing.T) {
	aside := testkit.SetAside(t, "rollback")
	mode := Mode{evidence: []seen{{Kind: "newer", Subject: ids.New(), Count: 3}}}
	shown := mode.Proto().GetEvidence()
	if len(shown) != 1 || shown[0].GetKind() != 0 || shown[0].GetCount() != 3 {
		t.Errorf("it shows %v", shown)
	}
	if n := aside(); n != 1 {
		t.Errorf("%d reported", n)
	}
}
