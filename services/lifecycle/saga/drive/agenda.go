package drive

import (
	"slices"
	"time"
)

// mostDue is how many times an agenda keeps. A driver has far fewer workers; the next poll finds runs whose times were
// left out.
const mostDue = 1024

// agenda keeps the times at which runs that this driver has parked are due again. The zero value is empty.
type agenda struct {
	times []time.Time // ascending
}

// add adds a time, unless the agenda is full.
func (a *agenda) add(at time.Time) {
	if len(a.times) == mostDue {
		return
	}
	i, _ := slices.BinarySearchFunc(a.times, at, time.Time.Compare)
	a.times = slices.Insert(a.times, i, at)
}

// untilDue returns how long it is from now to the earliest time after since, and drops the times that are not after
// since: the driver has already looked for the runs that were due by then. It returns false if there is none.
func (a *agenda) untilDue(since, now time.Time) (time.Duration, bool) {
	passed := 0
	for passed < len(a.times) && !a.times[passed].After(since) {
		passed++
	}
	a.times = slices.Delete(a.times, 0, passed)
	if len(a.times) == 0 {
		return 0, false
	}
	return max(a.times[0].Sub(now), 0), true
}
