// Package absence counts in how many checks in a row the authority did not answer or did not sign, and decides when
// that begins to count as a time in which nothing is issued, and when it is over.
package absence

import "time"

// after is how many checks in a row must fail.
const after = 3

// Count has the checks of one holder of the preflight's lease. The zero value is that of a new holder, which does not
// know whether an absence lasts that one before has recorded: its first good check ends it.
type Count struct {
	failures int       // in a row
	from     time.Time // of the first of them
	recorded bool      // that they began to count
	present  bool      // no absence lasts
}

// Stop is what a check leads to: From for an absence that begins to count, Until for the end of any that lasts. The
// zero value is neither.
type Stop struct{ From, Until time.Time }

// Add counts a check and returns what is to be recorded of it. It returns the same after the next check unless Recorded
// was called.
func (c *Count) Add(failed bool, at time.Time) Stop {
	switch {
	case !failed && c.present:
		c.failures = 0
	case !failed:
		c.failures = 0
		return Stop{Until: at}
	case c.failures == 0:
		c.failures, c.from = 1, at
	default:
		c.failures++
	}
	if c.failures < after || c.recorded {
		return Stop{}
	}
	return Stop{From: c.from}
}

// Recorded notes that a stop was recorded.
func (c *Count) Recorded(s Stop) {
	c.present = s.From.IsZero()
	c.recorded = !c.present
}
