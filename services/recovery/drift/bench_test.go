package drift_test

import (
	"testing"

	"github.com/gpuaas/mesh/services/recovery/drift"
)

// common is the evidence about nodes as nearly all of them are.
var common = map[string][]drift.Evidence{
	"connected":    {active, isHeard, admitted, roomy},
	"disconnected": {active, isLost, admitted, roomy},
	"down":         {active, isDown, admitted, roomy},
	"unreachable":  {active},
	"in an outage": {active, isLost, admitted, roomy, noServer},
}

// TestClassifyAllocatesNothing: a verdict costs no allocation, so that a judge of a whole fleet makes no garbage.
func TestClassifyAllocatesNothing(t *testing.T) {
	for name, evidence := range common {
		t.Run(name, func(t *testing.T) {
			var v drift.Verdict
			if n := testing.AllocsPerRun(100, func() { v = drift.Classify(evidence, now) }); n != 0 {
				t.Errorf("%v allocations, want 0: %+v", n, v)
			}
		})
	}
}

// BenchmarkClassify prints verdicts a second on one core.
func BenchmarkClassify(b *testing.B) {
	for name, evidence := range common {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var v drift.Verdict
			for b.Loop() {
				v = drift.Classify(evidence, now)
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "verdicts/s")
			_ = v
		})
	}
}
