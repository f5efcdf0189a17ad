package ledger

import (
	"context"
	"fmt"

	"go.etcd.io/bbolt"
)

// Disown takes an attempt that was signed for another node out of everything that this ledger lists, and keeps it in a table of its own: it is evidence,
// and it is not this node's to run or to speak of. An unknown key is no error.
func (l *Ledger) Disown(ctx context.Context, key Key) error {
	// It stops being listed at once, whether or not the move is on disk.
	l.mu.Lock()
	delete(l.open, key)
	l.mu.Unlock()
	err := l.submit(ctx, &write{
		apply: func(tx *bbolt.Tx) error {
			tasks := tx.Bucket(bucketTasks)
			value := tasks.Get(key.bytes())
			if value == nil {
				return nil
			}
			foreign, err := tx.CreateBucketIfNotExists(bucketForeign)
			if err != nil {
				return err
			}
			if err := foreign.Put(key.bytes(), append([]byte(nil), value...)); err != nil { // the page that holds value may move under the write
				return err
			}
			return tasks.Delete(key.bytes())
		},
	})
	if err != nil {
		return fmt.Errorf("disown task %s: %w", key, err)
	}
	return nil
}

// Disowned lists the attempts that were signed for another node.
func (l *Ledger) Disowned() ([]Entry, error) {
	var out []Entry
	err := l.db.View(func(tx *bbolt.Tx) error {
		foreign := tx.Bucket(bucketForeign)
		if foreign == nil {
			return nil
		}
		return foreign.ForEach(func(_, value []byte) error {
			e, err := decode(value)
			out = append(out, e)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read disowned tasks: %w", err)
	}
	return out, nil
}
