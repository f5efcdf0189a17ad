// Package silence is the one rule for when a node that is not heard counts as down.
//
// It decides from three times of the database's clock: when the node was heard last, since when replicas of nodeapi
// have listened without a gap, and now. No node is judged for the time in which none of them listened, or in which one
// turned agents away because too many came at once, nor for the ten seconds after it, in which nodes come back.
package silence

import "time"

// Amnesty is the time after replicas of nodeapi began to listen again in which silence does not count.
const Amnesty = 10 * time.Second

// Rule is the rule at one moment.
type Rule struct {
	After          time.Duration // how long a node must be silent; node.heartbeat_stale_after_seconds of the policy
	ListeningSince time.Time     // zero: no replica listens
}

// DownAt returns when a node that was heard last at the given time counts as down if it stays silent, and whether it
// does: while no replica listens, silence is no evidence.
func (r Rule) DownAt(heard time.Time) (time.Time, bool) {
	if r.ListeningSince.IsZero() {
		return time.Time{}, false
	}
	if from := r.ListeningSince.Add(Amnesty); from.After(heard) {
		heard = from
	}
	return heard.Add(r.After), true
}

// Down reports whether a node that was heard last at the given time counts as down now.
func (r Rule) Down(heard, now time.Time) bool {
	at, ok := r.DownAt(heard)
	return ok && !now.Before(at)
}
