package trust

import (
	"slices"
	"testing"

	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

// TestRefusalsOfABalancer: R refuses, T trusts, and in a check with U nothing is proven. An address of which one of two
// proxies refuses begins a mismatch, which lasts until it has accepted for as long as is remembered.
func TestRefusalsOfABalancer(t *testing.T) {
	const address = "balancer:443"
	for _, c := range []struct{ checks, want string }{
		{"TTRTRTRTR", "ooooMMMMM"},
		{"TTRTRTTTT", "ooooMMMMM"},
		{"TTRTRTTTTT", "ooooMMMMMo"},
		{"TTRTTTTRTT", "oooooooooo"}, // once in a while
		{"TTRUTR", "oooooM"},
		{"TTRRTT", "oooMMo"},
		{"TTRRTRT", "oooMMMM"},
		{"TTRURR", "oooooM"},
	} {
		s, row := streaks{}, preflightRow{State: stateOK}
		for i, one := range c.checks {
			check := &check{targets: []*target{{
				address: address, outcome: map[rune]outcome{'R': canary.Refused, 'T': canary.Trusted, 'U': canary.Unproven}[one],
			}}}
			s.add(check)
			state, refusing := s.concluded(row, check)
			row.State, row.RefusedBy = map[bool]string{true: stateMismatch, false: stateOK}[state == mismatch], refusing
			if is := row.State == stateMismatch; is != (c.want[i] == 'M') || is != slices.Contains(refusing, address) {
				t.Errorf("%s: check %d: %s, by %v; want %s", c.checks, i+1, row.State, refusing, c.want)
			}
			if one == 'R' && row.State == stateOK && !s.undecided(row) {
				t.Errorf("%s: check %d: the next check is not soon", c.checks, i+1)
			}
		}
	}
}
