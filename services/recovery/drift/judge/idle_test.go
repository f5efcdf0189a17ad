package judge_test

import (
	"testing"
	"time"
)

// TestProbesRest: while no node is to be probed the next round of probes is far away, and a round of verdicts wakes it.
// A probe whose answer is lost, or that has not ended, is asked for soon.
func TestProbesRest(t *testing.T) {
	k := newKit(t)
	after := func(what string, least, most time.Duration, fails bool) {
		t.Helper()
		next, err := k.judge.ProbeRound(k.ctx)
		if (err != nil) != fails || next < least || next > most {
			t.Errorf("%s: the next round comes after %s: %v", what, next, err)
		}
	}
	after("nothing to probe", 10*time.Second, time.Minute, false)
	k.fail(k.up())
	k.lifecycle.lost = true
	after("a lost answer", 0, 5*time.Second, true)
	k.lifecycle.lost = false
	k.pass(6 * time.Second)
	k.beat()
	after("a probe that has not ended", 0, time.Second, false)
}
