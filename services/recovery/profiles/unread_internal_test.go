package profiles

import (
	"testing"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// One of two profiles has a version in a phase that this build does not know: it is neither offered nor given, and
// shown without a phase; the other profile is active as before.
func TestAnUnknownPhaseStopsNoOtherProfile(t *testing.T) {
	reported := testkit.SetAside(t, "profiles")
	odd := row{ID: ids.New(), Name: "odd", Number: 1, Phase: "orbiting"}
	plain := row{ID: ids.New(), Name: "plain", Number: 2, Phase: active}
	p := pageOf(t.Context(), []row{odd, plain}, 7)
	if p.active["odd"] != nil || p.active["plain"].GetVersion() != 2 || len(p.authority.GetProfiles()) != 1 {
		t.Errorf("active are %v, known to replicas %v", p.active, p.authority.GetProfiles())
	}
	if n := reported(); n != 1 {
		t.Errorf("%d versions were reported", n)
	}
	if v := odd.proto("plain"); v.GetPhase() != recoveryv1.ProfilePhase_PROFILE_PHASE_UNSPECIFIED ||
		v.GetProfile().GetName() != "odd" {
		t.Errorf("shown as %v", v)
	}
}
