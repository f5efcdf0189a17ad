package limits

import (
	"fmt"
	"testing"
	"time"
)

// Scenario: machines of one use each enrol for months. A bucket that is full again says nothing that no bucket says
// too.
func TestFullBucketsAreForgotten(t *testing.T) {
	t.Parallel()
	l := New(1, 2)
	now := time.Unix(0, 0)
	for n := range 1000 {
		if err := l.Allow(fmt.Sprint(n), now); err != nil {
			t.Fatal(err)
		}
		now = now.Add(500 * time.Millisecond)
	}
	if l.idle.Len() != len(l.buckets) || len(l.buckets) > 4 {
		t.Errorf("after 1000 callers %d buckets are kept in a list of %d, want 4 at most", len(l.buckets), l.idle.Len())
	}
	for range 2 {
		if err := l.Allow("again", now); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Allow("other", now); err != nil {
		t.Fatal(err)
	}
	if err := l.Allow("again", now); err == nil {
		t.Error("a bucket that is not full was forgotten: its caller may call a third time")
	}
}
