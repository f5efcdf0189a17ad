package saga

import "time"

// RetryPolicy bounds repeated attempts. Zero fields take the defaults of the direction.
type RetryPolicy struct {
	Attempts int           // in all, the first included
	Within   time.Duration // no further attempt once this much has passed since the first; zero: no such bound
	First    time.Duration // wait before the second attempt; doubled for each later one
	Max      time.Duration // of one wait
}

func (p RetryPolicy) orDefault(d RetryPolicy) RetryPolicy {
	if p.Attempts == 0 {
		p.Attempts = d.Attempts
	}
	if p.Within == 0 {
		p.Within = d.Within
	}
	if p.First == 0 {
		p.First = d.First
	}
	if p.Max == 0 {
		p.Max = d.Max
	}
	return p
}

// Wait returns how long to wait after the given number of failures.
func (p RetryPolicy) Wait(failures int) time.Duration {
	d := p.First
	for range failures - 1 {
		if d >= p.Max/2 {
			return p.Max
		}
		d *= 2
	}
	return min(d, p.Max)
}
