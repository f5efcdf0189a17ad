package clock_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/clock"
)

func TestServerTimeCountsOnMonotonically(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clock.New(24 * time.Hour) // the host is a day ahead
		start := time.Now()
		if got := c.Now().Sub(start); got != 24*time.Hour {
			t.Errorf("Now before any server time = %v off, want the wall clock's day", got)
		}
		if _, ok := c.Skew(); ok {
			t.Error("Skew known before any server time")
		}
		sent := time.Now()
		time.Sleep(200 * time.Millisecond)
		c.Observe(sent.Add(100*time.Millisecond), sent) // read in the middle of the trip
		if got := time.Until(c.Now()); got != 0 {
			t.Errorf("Now is %v off the true time", got)
		}
		if skew, ok := c.Skew(); !ok || skew != 24*time.Hour {
			t.Errorf("Skew = %v, %v", skew, ok)
		}
		time.Sleep(time.Hour)
		if got := time.Until(c.Now()); got != 0 {
			t.Errorf("an hour later Now is %v off", got)
		}
		if got := c.Elapsed(); got != time.Hour+200*time.Millisecond {
			t.Errorf("Elapsed = %v", got)
		}
	})
}

func TestSlowerReadingsDoNotReplaceBetterOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := clock.New(0)
		observe := func(trip, lie time.Duration) {
			sent := time.Now()
			time.Sleep(trip)
			c.Observe(sent.Add(trip/2).Add(lie), sent)
		}
		observe(10*time.Millisecond, 0)
		observe(5*time.Second, time.Second)
		if got := time.Until(c.Now()); got != 0 {
			t.Errorf("a slow reading replaced a good one: %v off", got)
		}
		observe(11*time.Second, time.Hour)
		if got := time.Until(c.Now()); got != 0 {
			t.Errorf("a reading beyond the bound was believed: %v off", got)
		}
		time.Sleep(2 * time.Minute)
		observe(time.Second, 3*time.Second)
		if got := time.Until(c.Now()); got != 3*time.Second {
			t.Errorf("an old reading was kept: %v off, want 3s", got)
		}
		c.Observe(time.Time{}, time.Now())
		if got := time.Until(c.Now()); got != 3*time.Second {
			t.Errorf("an empty time was believed: %v off", got)
		}
	})
}
