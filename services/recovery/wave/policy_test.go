package wave_test

import (
	"testing"

	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery/wave"
)

// TestTheLimitsAreThePolicys: of a fleet of 40 as many nodes are refused as the keys allow, and the next one waits.
func TestTheLimitsAreThePolicys(t *testing.T) {
	for name, c := range map[string]struct {
		values  map[string]string
		refused int
	}{
		"defaults":       {nil, 3},
		"a larger share": {map[string]string{policy.BrakeIdentityFraction: "0.2"}, 8},
		"a lower least":  {map[string]string{policy.BrakeIdentityLeast: "1"}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.IO(t)
			db := testkit.DB(t)
			pool, ctx := db.Pool(pg.RoleRecovery), testkit.Context(t)
			fleet(t, pool, 40)
			set, err := policy.NewSet(c.values)
			if err != nil {
				t.Fatal(err)
			}
			limits := wave.LimitsOf(policy.Fixed{Set: set})
			for n := range c.refused + 1 {
				err := wave.Refuse(ctx, pool, limits, ids.New(), fault.New(unknown, ""))
				if refused := fault.ReasonOf(err) == unknown; refused != (n < c.refused) {
					t.Fatalf("node %d: %v", n+1, err)
				}
			}
		})
	}
}
