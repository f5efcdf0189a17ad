package ledger

// Queued returns how many writes wait for a commit.
func (l *Ledger) Queued() int { return len(l.queue) }
