package judge_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/services/recovery/drift"
)

// TestBudgetsFollowThePolicy checks that the budgets of a verdict are those of this mesh's policy: tightened, weakened,
// and of a row that is tighter than its severity's default.
func TestBudgetsFollowThePolicy(t *testing.T) {
	under := func(values map[string]string) policy.Set {
		set, err := policy.NewSet(values)
		if err != nil {
			t.Fatal(err)
		}
		return set
	}
	k := newKit(t)
	k.policy = under(map[string]string{policy.BudgetP0DetectSeconds: "20", policy.BudgetP0RecoverSeconds: "300"})
	k.judge = k.another()
	n := k.up()
	k.enter(n, fencedState, "")
	k.round()
	v := k.wantReasons(n.id(), revoked)
	if v.GetDetectWithin().AsDuration() != 20*time.Second || v.GetRecoverWithin().AsDuration() != 5*time.Minute {
		t.Errorf("budgets of %v", v)
	}
	for _, tt := range []struct {
		name            string
		reason          drift.Evidence
		values          map[string]string
		detect, recover time.Duration
	}{
		{"default", saw(host, hostPart, clockSkew), nil, 5 * time.Minute, time.Hour},
		{
			"weakened", saw(host, hostPart, clockSkew),
			map[string]string{policy.BudgetP1DetectSeconds: "600", policy.BudgetP1RecoverSeconds: "7200"},
			10 * time.Minute, 2 * time.Hour,
		},
		{
			"a tighter row", isDown,
			map[string]string{policy.BudgetP2DetectSeconds: "3600", policy.BudgetP2RecoverSeconds: "43200"},
			5 * time.Minute, 12 * time.Hour,
		},
		{"a tighter key", isDown, map[string]string{policy.BudgetP2DetectSeconds: "60"}, time.Minute, 24 * time.Hour},
		{"another severity", isDown, map[string]string{policy.BudgetP0DetectSeconds: "5"}, 5 * time.Minute, 24 * time.Hour},
	} {
		evidence := []drift.Evidence{tt.reason}
		if tt.reason != isDown {
			evidence = append(evidence, isLost)
		}
		v := drift.Classify(evidence, now).Under(under(tt.values))
		if v.Reason != tt.reason.Reason || v.DetectWithin != tt.detect || v.RecoverWithin != tt.recover {
			t.Errorf("%s: %v, detect within %s, recover within %s", tt.name, v.Reason, v.DetectWithin, v.RecoverWithin)
		}
	}
}
