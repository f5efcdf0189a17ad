package events

import (
	"testing"
	"time"
)

func TestFloorWaitsForWhoeverMayStillCommitBelowIt(t *testing.T) {
	var f floor
	f.whole = time.Now()
	at := func() int64 { return f.at(f.whole) }
	f.saw(10, 9, 100, false) // the first round has seen nothing before it
	if at() != 0 {
		t.Fatalf("floor %d after the first round", at())
	}
	f.saw(20, 15, 200, false) // whoever drew up to 100 is below 20, and 15 still runs
	if at() != 0 {
		t.Fatalf("floor %d while an older transaction runs", at())
	}
	f.saw(30, 30, 300, true) // a full round may have left some behind
	if at() != 0 {
		t.Fatalf("floor %d after a round that was full", at())
	}
	f.saw(40, 35, 350, false) // all below 35 have ended: those of the marks at 20 and 30
	if at() != 200 {
		t.Fatalf("floor %d, not 200", at())
	}
	if got := f.at(f.whole.Add(wholeEvery)); got != 0 {
		t.Fatalf("the whole index is not looked at: %d", got)
	}
}
