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
	if source.set, err = policy.NewSet(map[string]string{
		policy.SagaStepStallSeconds: "60", policy.SagaWaitReadyStallSeconds: "120", policy.SagaStallSeconds: "180",
	}); err != nil {
		t.Fatal(err)
	}
	for step, want := range map[string]time.Duration{
		StepDeploy: time.Minute, StepReady: 2 * time.Minute, "": 3 * time.Minute,
	} {
		if got := s.Stalls(DefinitionRecreate, step); got != want {
			t.Errorf("%q after a change: %s, want %s", step, got, want)
		}
	}
}

// TestACrashLoopIsOfAsManyRestartsAsThePolicySays: the step that waits for workloads reads the key each time.
func TestACrashLoopIsOfAsManyRestartsAsThePolicySays(t *testing.T) {
	source := &moving{set: policy.Defaults()}
	s := NewSteps(StepDeps{Policy: source})
	if n := s.crashLoop(); n != 3 {
		t.Errorf("by default: %d", n)
	}
	var err error
	if source.set, err = policy.NewSet(map[string]string{policy.WorkloadCrashLoopRestarts: "7"}); err != nil {
		t.Fatal(err)
	}
	if n := s.crashLoop(); n != 7 {
		t.Errorf("after a change: %d", n)
	}
}

type moving struct{ set policy.Set }

func (m *moving) Current() policy.Set { return m.set }
