package task

// Stats returns the counters.
func (e *Executor) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.stats
}

// Idle reports whether no task is accepted and unfinished.
func (e *Executor) Idle() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.jobs) == 0
}
