package task

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/ledger"
)

func TestEarlyCancelsAreBounded(t *testing.T) {
	var c prestartCancels
	start := time.Unix(1000, 0)
	key := func(i int) ledger.Key { return ledger.Key{TaskID: "t", Attempt: int32(i + 1)} }
	for i := range maxEarly + 5 {
		c.add(key(i), start)
		c.add(key(i), start.Add(time.Minute)) // a second cancel takes no second place, and does not extend the time
	}
	if len(c.at) != maxEarly || len(c.order) != maxEarly {
		t.Fatalf("%d and %d are held", len(c.at), len(c.order))
	}
	for i := range maxEarly + 5 {
		if got, want := c.has(key(i), start.Add(prestartFor)), i >= 5; got != want {
			t.Fatalf("%d is held: %v", i, got)
		}
	}
	if c.has(key(maxEarly), start.Add(prestartFor+time.Second)) || len(c.at)+len(c.order) != 0 {
		t.Errorf("%d are held after their time", len(c.at))
	}
}
