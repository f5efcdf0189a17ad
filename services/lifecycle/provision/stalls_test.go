package provision

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/policy"
)

// The policy of stalls is read each time: a change takes effect without a restart.
func TestStallsFollowThePolicy(t *testing.T) {
	if by := (&Steps{}).Stalls(DefinitionProvision, StepDeploy); by != 0 {
		t.Errorf("without a policy: %s", by)
	}
	set := policy.Defaults()
	source := &moving{set: set}
	s := NewSteps(StepDeps{Policy: source})
	for step, want := range map[string]time.Duration{
		"": set.SagaStall(), StepReady: set.SagaWaitReadyStall(),
		StepDeploy: set.SagaStepStall(), StepPrevious: set.SagaStepStall(),
	} {
		if got := s.Stalls(DefinitionRecreate, step); got != want || got == 0 {
			t.Errorf("%q: %s, want %s", step, got, want)
		}
	}
	var err error
	if source.set, err = policy.NewSet(map[string]string{policy.SagaStepStallSeconds: "60"}); err != nil {
		t.Fatal(err)
	}
	if got := s.Stalls(DefinitionRecreate, StepDeploy); got != time.Minute {
		t.Errorf("after a change: %s", got)
	}
}

type moving struct{ set policy.Set }

func (m *moving) Current() policy.Set { return m.set }
