package trust

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A preflight that a newer build wrote counts as unknown, which stops the issuance of certificates as well; its side is
// left out. Both values are reported.
func TestAPreflightOfANewerBuildIsUnknown(t *testing.T) {
	aside := testkit.SetAside(t, "ca_preflight")
	row := preflightRow{State: "newer", Side: "newer", Summary: "s"}
	if shown := row.message(); shown.GetState() != unknown || shown.GetFailingSide() != 0 || shown.GetSummary() != "s" {
		t.Errorf("it shows %v", shown)
	}
	if n := aside(); n != 2 {
		t.Errorf("%d reported", n)
	}
}

// A rotation in a phase that this build does not know is shown without its phase, and reported.
func TestARotationInANewerPhaseIsReported(t *testing.T) {
	aside := testkit.SetAside(t, "authority_rotation")
	row := rotationRow{ID: ids.New(), Phase: "newer", Reason: "r"}
	if shown := row.message(); shown.GetPhase() != 0 || shown.GetReason() != "r" {
		t.Errorf("it shows %v", shown)
	}
	if n := aside(); n != 1 {
		t.Errorf("%d reported", n)
	}
}
