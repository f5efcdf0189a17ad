package task

// Stats are counters since the executor was made.
type Stats struct{ Delivered, Refused, Busy, Panics int64 }

// Stats returns the counters.
func (e *Executor) Stats() Stats {
	return Stats{
		Delivered: e.stats.delivered.Load(), Refused: e.stats.refused.Load(), Busy: e.stats.busy.Load(),
		Panics: e.stats.panics.Load(),
	}
}

// Idle reports whether no task is accepted and unfinished.
func (e *Executor) Idle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.jobs) == 0
}
