package claims_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/lifecycle/claims"
)

// A claim of a scope that this build does not know is shown without its scope, and reported.
func TestAClaimOfANewerScopeIsReported(t *testing.T) {
	aside := testkit.SetAside(t, "claim")
	c := claims.Claim{ID: ids.New(), Scope: "newer", Name: "a"}
	if shown := c.Proto(); shown.GetScope() != 0 || shown.GetName() != "a" {
		t.Errorf("it shows %v", shown)
	}
	if n := aside(); n != 1 {
		t.Errorf("%d reported", n)
	}
}
