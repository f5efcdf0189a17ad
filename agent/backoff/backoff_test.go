package backoff_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
)

func TestRangeDoublesToItsCap(t *testing.T) {
	var bounds []time.Duration
	b := backoff.New(backoff.Policy{Base: time.Second, Cap: 30 * time.Second}).WithDraw(func(n int64) int64 {
		bounds = append(bounds, time.Duration(n))
		return n - 1
	})
	for range 8 {
		b.Next(0)
	}
	want := []int{1, 2, 4, 8, 16, 30, 30, 30}
	for i, seconds := range want {
		if bounds[i].Seconds() != float64(seconds) {
			t.Errorf("bound of attempt %d = %v, want %d s", i, bounds[i], seconds)
		}
	}
	if b.Attempts() != 8 {
		t.Errorf("Attempts() = %d, want 8", b.Attempts())
	}
	b.Reset()
	b.Next(0)
	if last := bounds[len(bounds)-1]; last != time.Second {
		t.Errorf("bound after Reset = %v, want 1s", last)
	}
}

func TestRangeWithinWhatIsLeft(t *testing.T) {
	b := backoff.New(backoff.Policy{
		Base: time.Second,
		Cap:  30 * time.Second,
	}).WithDraw(func(n int64) int64 { return n - 1 })
	for i, want := range []time.Duration{time.Second, 2 * time.Second, 3 * time.Second, 3 * time.Second} {
		if got := b.NextWithin(time.Second, 3*time.Second); got != time.Second+want-1 {
			t.Errorf("wait %d = %v, want all of %v after the second asked for", i, got, want)
		}
	}
	if got := b.Next(0); got != 16*time.Second-1 {
		t.Errorf("Next = %v: the attempts within a bound do not count", got)
	}
}

func TestNeverBeforeRetryAfter(t *testing.T) {
	b := backoff.New(backoff.Policy{Base: time.Second, Cap: 30 * time.Second})
	for range 1000 {
		if d := b.Next(10 * time.Second); d < 10*time.Second || d >= 40*time.Second {
			t.Fatalf("Next(10s) = %v", d)
		}
	}
	if d := b.Next(-time.Hour); d < 0 {
		t.Fatalf("Next of a negative wait = %v", d)
	}
}

func TestFullJitterSpreads(t *testing.T) {
	b := backoff.New(backoff.Policy{Base: 30 * time.Second, Cap: 30 * time.Second})
	var buckets [10]int
	for range 10_000 {
		buckets[b.Next(0)/(3*time.Second)]++
	}
	for i, n := range buckets {
		if n < 700 || n > 1300 {
			t.Errorf("bucket %d holds %d of 10000 draws: not spread over the range", i, n)
		}
	}
}

func TestZeroValue(t *testing.T) {
	var b backoff.Backoff
	if d := b.Next(time.Second); d != time.Second {
		t.Errorf("Next = %v, want the time asked for", d)
	}
}
