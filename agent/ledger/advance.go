package ledger

import (
	"context"
	"errors"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
)

// Outcome is what Deliver did with one task.
type Outcome struct {
	Entry      Entry // as it is stored now
	Known      bool  // it was in the ledger before: nothing changed
	Superseded bool  // its epoch or op_seq is lower than one that was seen: it is stored, and Start will refuse it
}

// Deliver stores tasks and returns the outcome of each, in their order. It returns after one commit for all of them,
// shared with other callers'. A task of a higher epoch raises the workspace's epoch. After an error a task may be
// stored even so: use Get to find out.
func (l *Ledger) Deliver(ctx context.Context, tasks ...Delivery) ([]Outcome, error) {
	if len(tasks) == 0 {
		return nil, nil
	}
	for i := range tasks {
		if err := tasks[i].valid(); err != nil {
			return nil, err
		}
	}
	out := make([]Outcome, len(tasks))
	err := l.submit(ctx, &write{
		apply: func(tx *transaction) error {
			for i := range tasks {
				var err error
				if out[i], err = deliver(tx, &tasks[i], l.now()); err != nil {
					return err
				}
			}
			return nil
		},
		after: func() {
			for i := range out {
				e := out[i].Entry
				// A commit that failed at its very end may be in the file: then the attempt is known, but was never added to
				// l.open.
				if _, listed := l.open[e.Key]; !out[i].Known || !listed && e.State < StateFinished {
					l.open[e.Key] = e
				}
			}
		},
	})
	if err != nil {
		return nil, fmt.Errorf("store delivered tasks: %w", err)
	}
	if err := failpoint.Hit("agent.deliver.after_fsync"); err != nil {
		return nil, err
	}
	return out, nil
}

func (d *Delivery) valid() error {
	switch {
	case d.Key.TaskID == "" || len(d.Key.TaskID) > 64 || d.Key.Attempt <= 0:
		return fmt.Errorf("store delivered task: key %q", d.Key)
	case len(d.WorkspaceID) > 64 || d.Epoch < 0 || d.OpSeq < 0:
		return fmt.Errorf("store delivered task %s: workspace, epoch or op_seq is malformed", d.Key)
	default:
		return nil
	}
}

func deliver(tx *transaction, d *Delivery, now time.Time) (Outcome, error) {
	known, found, err := get(tx, d.Key)
	if err != nil || found {
		return Outcome{Entry: known, Known: found}, err
	}
	e := Entry{Delivery: *d, State: StateDelivered, DeliveredAt: now}
	fenced, f := fenceOf(tx, d)
	superseded := fenced && f.refuses(d)
	if fenced && !superseded && d.Epoch > f.epoch {
		f.epoch = d.Epoch
		f.put(tx, d.WorkspaceID)
	}
	if d.Start && !superseded {
		start(tx, &e, now)
	}
	e.Start = false
	put(tx, &e)
	return Outcome{Entry: e, Superseded: superseded}, nil
}

// Start marks an attempt as started, durably, and returns its entry. ErrSuperseded, ErrNotDelivered and ErrUnknown mean
// that it must not run.
func (l *Ledger) Start(ctx context.Context, key Key) (Entry, error) {
	var e Entry
	var refused error
	err := l.submit(ctx, &write{
		apply: func(tx *transaction) error {
			var found bool
			var err error
			e, found, err = get(tx, key)
			switch {
			case err != nil:
				return err
			case !found:
				refused = ErrUnknown
				return nil
			case e.State != StateDelivered:
				refused = ErrNotDelivered
				return nil
			}
			if fenced, f := fenceOf(tx, &e.Delivery); fenced && f.refuses(&e.Delivery) {
				refused = ErrSuperseded
				return nil
			}
			start(tx, &e, l.now())
			put(tx, &e)
			return nil
		},
		after: func() {
			// A commit that failed at its very end may have started it.
			_, listed := l.open[key]
			if refused == nil || listed && errors.Is(refused, ErrNotDelivered) && e.State == StateStarted {
				l.open[key] = e
			}
		},
	})
	if err != nil {
		return Entry{}, fmt.Errorf("store start of task %s: %w", key, err)
	}
	return e, refused
}

// start marks e and raises the workspace's numbers to its own.
func start(tx *transaction, e *Entry, now time.Time) {
	e.State, e.StartedAt = StateStarted, now
	fenced, f := fenceOf(tx, &e.Delivery)
	if !fenced || (f.epoch >= e.Epoch && f.opSeq >= e.OpSeq) {
		return
	}
	f.epoch, f.opSeq = max(f.epoch, e.Epoch), max(f.opSeq, e.OpSeq)
	f.put(tx, e.WorkspaceID)
}

// Finish stores the result of an attempt: the state it ended in and the encoded TaskResult. A second call returns the
// first one's entry, unchanged.
func (l *Ledger) Finish(ctx context.Context, key Key, outcome commonv1.TaskState, result []byte) (Entry, error) {
	if err := failpoint.Hit("agent.result.before_fsync"); err != nil {
		return Entry{}, err
	}
	var e Entry
	var refused error
	err := l.submit(ctx, &write{
		apply: func(tx *transaction) error {
			var found bool
			var err error
			e, found, err = get(tx, key)
			switch {
			case err != nil:
				return err
			case !found:
				refused = ErrUnknown
				return nil
			case e.State >= StateFinished:
				return nil
			}
			e.State, e.FinishedAt, e.Outcome, e.Result = StateFinished, l.now(), outcome, result
			put(tx, &e)
			return nil
		},
		after: func() {
			if refused == nil && e.State == StateFinished {
				l.open[key] = e
			}
		},
	})
	if err != nil {
		return Entry{}, fmt.Errorf("store result of task %s: %w", key, err)
	}
	if err := failpoint.Hit("agent.result.after_fsync"); err != nil {
		return Entry{}, err
	}
	return e, refused
}

// Ack notes that the control plane has committed these results. It waits for no commit: an acknowledgement that is lost
// in a crash comes again when the result is sent again. Keys that are unknown or have no result are ignored.
func (l *Ledger) Ack(ctx context.Context, keys ...Key) error {
	if len(keys) == 0 {
		return nil
	}
	// Their results stop being sent at once, whether or not the acknowledgement is on disk.
	l.mu.Lock()
	for _, key := range keys {
		if e, ok := l.open[key]; ok && e.State == StateFinished {
			delete(l.open, key)
		}
	}
	l.mu.Unlock()
	err := l.enqueue(ctx, &write{lazy: true, apply: func(tx *transaction) error {
		for _, key := range keys {
			e, found, err := get(tx, key)
			if err != nil {
				return err
			}
			if !found || e.State != StateFinished {
				continue
			}
			e.State = StateAcked
			put(tx, &e)
		}
		return nil
	}})
	if err != nil {
		return fmt.Errorf("store acknowledgement: %w", err)
	}
	return nil
}
