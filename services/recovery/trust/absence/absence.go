// Package absence counts in how many checks in a row the authority did not answer or did not sign, and decides when
// that begins to count as a time in which nothing is issued, and when it is over.
package absence

import "time"

const (
	// after is how many checks in a row must fail.
	after = 3
	// again is the time after which an absence that lasts is recorded again.
	again = 30 * time.Second
)

// Count has the checks of one holder of the preflight's lease. The zero value is that of a new holder, which does not
// know whether an absence lasts that one before has recorded: its first good check ends it.
type Count struct {
	failures int       // in a row
	from     time.Time // since when the authority may have been away, if they began to count
	at       time.Time // of the last check
	recorded time.Time // when the absence that lasts was recorded last; zero: it was not
	present  bool      // no absence lasts
	signed   time.Time // when the authority signed last; zero: it has not for this holder
}

// Stop is what a check leads to: From for an absence that begins to count or goes on, Until for the end of any that
// lasts. The zero value is neither.
type Stop struct {
	From, Until time.Time
	GoesOn      bool // it was recorded before
}

// Signed notes that the authority has signed at a time.
func (c *Count) Signed(at time.Time) { c.signed = at }

// Add counts a check and returns what is to be recorded of it. It returns the same after the next check unless Recorded
// was called. A check that has failed although the authority answered counts from the last signature, since not every
// check has one made.
func (c *Count) Add(failed, answered bool, at time.Time) Stop {
	c.at = at
	switch {
	case !failed && c.present:
		c.failures = 0
	case !failed:
		c.failures = 0
		return Stop{Until: at}
	case c.failures == 0:
		c.failures, c.from = 1, at
		if answered && !c.signed.IsZero() {
			c.from = c.signed
		}
	default:
		c.failures++
	}
	if c.failures < after || !c.recorded.IsZero() && at.Sub(c.recorded) < again {
		return Stop{}
	}
	return Stop{From: c.from, GoesOn: !c.recorded.IsZero()}
}

// Recorded notes that a stop was recorded.
func (c *Count) Recorded(s Stop) {
	c.present, c.recorded = s.From.IsZero(), time.Time{}
	if !c.present {
		c.recorded = c.at
	}
}
