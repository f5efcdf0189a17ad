package nodes

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TestEvidenceThatIsOverIsNoFault: of a part the newest evidence counts, as of the time for which recovery answered.
func TestEvidenceThatIsOverIsNoFault(t *testing.T) {
	now := time.Date(2031, 5, 6, 7, 8, 9, 0, time.UTC)
	at := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(d)) }
	const host = commonv1.DriftPart_DRIFT_PART_HOST
	parts := []*recoveryv1.Evidence{
		{
			Part: host, Reason: commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, ObservedAt: at(-time.Minute),
			FreshUntil: at(-time.Second),
		},
		{Part: host, Reason: commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW, ObservedAt: at(-3 * time.Minute)},
		{
			Part: host, Reason: commonv1.DriftReason_DRIFT_REASON_HOST_RUNTIME_DRIFT, ObservedAt: at(-2 * time.Minute),
			FreshUntil: at(time.Minute),
		},
		{Part: host, ObservedAt: at(0)}, // the part is well, by another source
		{
			Part: commonv1.DriftPart_DRIFT_PART_PROCESS, Reason: commonv1.DriftReason_DRIFT_REASON_AGENT_DOWN,
			ObservedAt: at(0),
		},
	}
	n := &readmodelv1.Node{Health: &recoveryv1.NodeHealth{AsOf: timestamppb.New(now), Parts: parts}}
	if got := newestFault(n, host); got != parts[2] {
		t.Errorf("the newest is %v", got)
	}
	n.Verdict = &recoveryv1.NodeVerdict{Reason: commonv1.DriftReason_DRIFT_REASON_CLOCK_SKEW}
	if got := newestFault(n, host); got != parts[1] {
		t.Errorf("the verdict's is %v", got)
	}
	n.Health.Parts = parts[:1]
	if got := newestFault(n, host); got != nil {
		t.Errorf("what is over is shown: %v", got)
	}
	// Without an answer of recovery it is the evidence of the last verdict, by the reader's clock.
	n = &readmodelv1.Node{Verdict: &recoveryv1.NodeVerdict{Evidence: []*recoveryv1.Evidence{{
		Part: host, Reason: commonv1.DriftReason_DRIFT_REASON_NODE_DISK_FULL, ObservedAt: at(0),
		FreshUntil: timestamppb.New(time.Now().Add(-time.Minute)),
	}}}}
	if got := newestFault(n, host); got != nil {
		t.Errorf("what is over is shown: %v", got)
	}
}
