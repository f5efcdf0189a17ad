package drive

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/services/lifecycle/saga"
)

// TestAWakeForgetsNoRetry checks that a driver which is woken for another reason still leases when a retry in its
// agenda is due, and not at the next poll.
func TestAWakeForgetsNoRetry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &Driver{core: &saga.Core{}, cfg: Config{Poll: time.Second}}
		woken := make(chan struct{}, 1)
		d.due(20 * time.Millisecond)
		d.due(5 * time.Millisecond)
		for _, want := range []time.Duration{0, 6 * time.Millisecond, 15 * time.Millisecond, time.Second} {
			if want == 0 {
				woken <- struct{}{}
			}
			began := time.Now()
			if !d.awaitWork(t.Context(), woken, began, time.Second) {
				t.Fatal("the driver stops")
			}
			if got := time.Since(began); got != want {
				t.Errorf("rested %s, want %s", got, want)
			}
		}
	})
}

func TestAnAgendaIsBoundedAndSorted(t *testing.T) {
	t.Parallel()
	var a agenda
	start := time.Now()
	for n := range 2 * mostDue {
		a.add(start.Add(time.Duration((n*7919)%mostDue) * time.Millisecond))
	}
	if len(a.times) != mostDue {
		t.Errorf("%d times", len(a.times))
	}
	wait, ok := a.untilDue(start.Add(9*time.Millisecond), start)
	if !ok || wait != 10*time.Millisecond {
		t.Errorf("next in %s, %v", wait, ok)
	}
	if _, ok := a.untilDue(start.Add(time.Hour), start); ok || len(a.times) != 0 {
		t.Errorf("%d times are left", len(a.times))
	}
}
