package status

import "time"

// judgedFresh is how long after the time up to which recovery has judged everything its verdicts are up to date: it
// notes that time every five seconds.
const judgedFresh = 15 * time.Second

// StaleSince returns the time up to which recovery has judged everything, if that is too long ago for its verdicts to
// be up to date; zero if they are, or if that time is not known.
func StaleSince(through *time.Time, now time.Time) time.Time {
	if through == nil || now.Sub(*through) <= judgedFresh {
		return time.Time{}
	}
	return *through
}

// EarlierStale returns since when the verdict about one node is stale: the earlier of what StaleSince returns and of
// the time since which recovery does not judge the node; nil: it does. Zero: the verdict is up to date.
func EarlierStale(everything time.Time, own *time.Time) time.Time {
	if own == nil || !everything.IsZero() && everything.Before(*own) {
		return everything
	}
	return *own
}

// StaleText returns the sentence that tells a workspace's user of which time the verdicts are from
// which its state follows.
func StaleText(at time.Time) string {
	return "What it runs on was last checked at " + at.UTC().Format(time.RFC3339) + ": it may have changed since."
}
