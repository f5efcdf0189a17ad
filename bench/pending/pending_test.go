package pending_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/pending"
)

// TestAnEndIsFoundBeforeAndAfterItsUnitIsExpected checks both orders, and that a further end of a unit does not block.
func TestAnEndIsFoundBeforeAndAfterItsUnitIsExpected(t *testing.T) {
	units, at := pending.New[string](), time.Now()
	units.Ended("early", at)
	units.Ended("early", at.Add(time.Second))
	if got := <-units.Expect("early"); !got.Equal(at) {
		t.Errorf("the end that came first is at %s, want %s", got, at)
	}
	late := units.Expect("late")
	select {
	case got := <-late:
		t.Errorf("a unit that has not ended ended at %s", got)
	default:
	}
	units.Ended("late", at)
	if got := <-late; !got.Equal(at) {
		t.Errorf("the end that came last is at %s, want %s", got, at)
	}
}
