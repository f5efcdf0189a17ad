package disconnect

import (
	"testing"
	"time"
)

// TestBothBoundsAreChecked checks the bounds: half of the breaks within the median, and all but one of a hundred within
// the p99.
func TestBothBoundsAreChecked(t *testing.T) {
	const ms = time.Millisecond
	for name, test := range map[string]struct {
		most, slowest time.Duration // of 98 breaks, and of the two slowest
		passed        bool
	}{
		"as required": {500 * ms, 3000 * ms, true},
		"slow median": {501 * ms, 3000 * ms, false},
		"slow p99":    {500 * ms, 3001 * ms, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := measured{broken: []time.Duration{test.slowest, test.slowest}}
			for range 98 {
				m.broken = append(m.broken, test.most)
			}
			r := m.evaluate(map[string]any{})
			if want := float64(test.slowest.Milliseconds()); r.Passed != test.passed || r.Value != want ||
				r.Ratio != want/MostP99 {
				t.Errorf("result = %+v", r)
			}
		})
	}
}
