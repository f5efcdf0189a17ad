package ledger

import (
	"context"
	"fmt"
	"slices"
)

// Abandon removes an attempt that was signed for another node from all lists of this ledger, and keeps it in a table of
// its own as evidence: this node must neither run nor report it. An unknown key is no error.
func (l *Ledger) Abandon(ctx context.Context, key Key) error {
	// It stops being listed at once, whether or not the move is on disk.
	l.mu.Lock()
	delete(l.open, key)
	l.mu.Unlock()
	err := l.submit(ctx, &write{
		apply: func(tx *transaction) error {
			if value := tx.get(tasks, key.bytes()); value != nil {
				tx.put(foreign, key.bytes(), slices.Clone(value))
				tx.remove(tasks, key.bytes())
			}
			return nil
		},
	})
	if err != nil {
		return fmt.Errorf("abandon task %s: %w", key, err)
	}
	return nil
}

// Abandoned lists the attempts that were signed for another node.
func (l *Ledger) Abandoned() ([]Entry, error) {
	var out []Entry
	err := l.store.each(foreign, func(_, value []byte) (bool, error) {
		e, err := decode(value)
		out = append(out, e)
		return true, err
	})
	if err != nil {
		return nil, fmt.Errorf("read disowned tasks: %w", err)
	}
	return out, nil
}
