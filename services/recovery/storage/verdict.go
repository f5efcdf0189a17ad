package storage

import (
	"fmt"
	"time"
)

const (
	// fullFrom is the share of the limit from which on there is an incident, and wellBelow that below which it ends.
	fullFrom, wellBelow = 0.8, 0.75
	// soon is the number of days within which the limit must not be reached at the present growth. An incident ends when
	// the limit is a day further away.
	soon = 7.0
	// little is the share of the limit below which growth alone is no incident, since a new database grows fast.
	little = 0.25
	// leastSpan is the shortest time over which growth is measured.
	leastSpan = 6 * time.Hour
)

// Size is the present and an earlier size of the database, in bytes.
type Size struct {
	Bytes int64
	Limit int64         // the size that it may grow to; 0: unknown
	Was   int64         // its size some time ago
	Span  time.Duration // the time since Was was measured
}

// PerDay returns the growth of the database in bytes a day; 0 if it does not grow, or was measured for less than
// leastSpan.
func (s Size) PerDay() int64 {
	if s.Span < leastSpan || s.Bytes <= s.Was {
		return 0
	}
	return int64(float64(s.Bytes-s.Was) / s.Span.Hours() * 24)
}

// Problem returns a description of why the database is about to reach its limit, or an empty text. An open incident
// ends only at stricter thresholds than those at which one opens.
func (s Size) Problem(open bool) string {
	if s.Limit <= 0 {
		return ""
	}
	share, days := fullFrom, soon
	if open {
		share, days = wellBelow, soon+1
	}
	used, perDay := float64(s.Bytes)/float64(s.Limit), s.PerDay()
	left := float64(s.Limit-s.Bytes) / float64(max(perDay, 1))
	switch {
	case used >= share:
		return fmt.Sprintf("the database takes %s, %.0f %% of the %s that it may take", mebibytes(s.Bytes), 100*used,
			mebibytes(s.Limit))
	case perDay > 0 && used >= little && left <= days:
		return fmt.Sprintf("the database takes %s and grows by %s a day: the %s that it may take are full in %.1f days",
			mebibytes(s.Bytes), mebibytes(perDay), mebibytes(s.Limit), left)
	default:
		return ""
	}
}

func mebibytes(n int64) string { return fmt.Sprintf("%.0f MiB", float64(n)/(1<<20)) }
