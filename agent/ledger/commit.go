package ledger

import (
	"context"
	"errors"
	"time"
)

// ErrClosed is returned by writes after Close.
var ErrClosed = errors.New("the task ledger is closed")

const (
	queueSize = 1024 // writes that wait for a commit; further callers wait for room in the queue
	maxBatch  = 512  // writes of one commit

	// lazyWait is how long an acknowledgement may wait for a commit that is made anyway. A lost acknowledgement costs one
	// result sent again.
	lazyWait = 2 * time.Second
)

// write is one caller's change. apply runs inside the transaction and must not fail half done; after, if set, runs once
// the commit is on disk.
type write struct {
	apply func(tx *transaction) error
	after func()
	lazy  bool
	done  chan error // nil for lazy writes: no caller waits
}

// submit hands w to the committer and waits until it is on disk. The end of ctx does not end the wait: a caller that
// stopped waiting would not know what the file has, and a commit takes milliseconds.
func (l *Ledger) submit(ctx context.Context, w *write) error {
	w.done = make(chan error, 1)
	if err := l.enqueue(ctx, w); err != nil {
		return err
	}
	return <-w.done
}

func (l *Ledger) enqueue(ctx context.Context, w *write) error {
	l.closing.RLock()
	defer l.closing.RUnlock()
	if l.closed {
		return ErrClosed
	}
	select {
	case l.queue <- w:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// commitLoop is the only writer of the file. It ends when the queue is closed and empty.
func (l *Ledger) commitLoop() {
	defer close(l.ended)
	for {
		batch, more := l.gather()
		if len(batch) > 0 {
			l.commit(batch)
		}
		if !more {
			return
		}
	}
}

// gather takes the waiting writes. It blocks for the first one; if all are lazy, it waits for others for at most
// lazyWait. It returns false once the queue is closed.
func (l *Ledger) gather() ([]*write, bool) {
	first, ok := <-l.queue
	if !ok {
		return nil, false
	}
	batch := append(make([]*write, 0, 16), first)
	lazy := first.lazy
	for len(batch) < maxBatch {
		select {
		case w, ok := <-l.queue:
			if !ok {
				return batch, false
			}
			batch = append(batch, w)
			lazy = lazy && w.lazy
			continue
		default:
		}
		break
	}
	if !lazy {
		return batch, true
	}
	timer := time.NewTimer(lazyWait)
	defer timer.Stop()
	for lazy && len(batch) < maxBatch {
		select {
		case w, ok := <-l.queue:
			if !ok {
				return batch, false
			}
			batch = append(batch, w)
			lazy = w.lazy
		case <-timer.C:
			return batch, true
		}
	}
	return batch, true
}

func (l *Ledger) commit(batch []*write) {
	err := l.store.commit(func(tx *transaction) error {
		for _, w := range batch {
			if err := w.apply(tx); err != nil {
				return err
			}
		}
		if l.gate != nil {
			return l.gate()
		}
		return nil
	})
	if err != nil && l.observe != nil {
		l.observe(err)
	}
	l.mu.Lock()
	l.stats.Commits++
	l.stats.Writes += int64(len(batch))
	if err == nil {
		for _, w := range batch {
			if w.after != nil {
				w.after()
			}
		}
	}
	l.mu.Unlock()
	for _, w := range batch {
		if w.done != nil {
			w.done <- err
		}
	}
}
