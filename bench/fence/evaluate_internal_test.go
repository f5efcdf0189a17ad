package fence

import (
	"testing"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// TestOneSlowChangeOfAFewFails checks the bounds, each with one of ten times over it.
func TestOneSlowChangeOfAFewFails(t *testing.T) {
	const ms = time.Millisecond
	for name, test := range map[string]struct {
		closed, returned, served time.Duration // the slowest
		passed                   bool
	}{
		"as required":    {2000 * ms, 12_000 * ms, 12_000 * ms, true},
		"slow to close":  {2001 * ms, 12_000 * ms, 12_000 * ms, false},
		"slow to return": {2000 * ms, 12_001 * ms, 12_000 * ms, false},
		"slow to serve":  {2000 * ms, 12_000 * ms, 12_001 * ms, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := measured{
				closed:   map[recoveryv1.IdentityVerb][]time.Duration{verbs[0]: {test.closed}},
				returned: map[recoveryv1.IdentityVerb][]time.Duration{verbs[1]: {test.returned}},
				served:   []time.Duration{test.served},
			}
			for range 9 {
				m.served = append(m.served, ms)
				m.closed[verbs[2]] = append(m.closed[verbs[2]], ms)
				m.returned[verbs[2]] = append(m.returned[verbs[2]], ms)
			}
			r := m.evaluate(map[string]any{})
			if want := float64(test.closed.Milliseconds()); r.Passed != test.passed || r.Value != want ||
				r.Ratio != want/MostClosing {
				t.Errorf("result = %+v", r)
			}
		})
	}
}
