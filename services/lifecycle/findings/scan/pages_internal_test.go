package scan

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestEndsThatStayAreReusedForLonger checks that the ends of pages are looked up anew after For, and that ends which
// were found as they had been before are reused for stableTimes as long.
func TestEndsThatStayAreReusedForLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPages(nil, 500)
		found := func(ids ...string) { p.keep("workspace", ids, time.Now()) }
		reused := func(want time.Duration) {
			t.Helper()
			time.Sleep(want - time.Nanosecond)
			if p.known("workspace") == nil {
				t.Errorf("the ends are not reused for %s", want)
			}
			time.Sleep(time.Nanosecond)
			if ids := p.known("workspace"); ids != nil {
				t.Errorf("the ends %v are reused after %s", ids, want)
			}
		}
		found(LastID)
		reused(endsFor)
		found(LastID)
		reused(stableTimes * endsFor)
		found("0198", LastID)
		reused(endsFor)
		if p.known("run") != nil {
			t.Error("the ends of another type are known")
		}
	})
}
