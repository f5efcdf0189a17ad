package ledger

import (
	"cmp"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Get returns the entry of an attempt, and whether there is one.
func (l *Ledger) Get(key Key) (Entry, bool, error) {
	l.mu.Lock()
	e, ok := l.open[key]
	l.mu.Unlock()
	if ok {
		return e, true, nil
	}
	if l.store.owed.Load() {
		return Entry{}, false, fmt.Errorf("read task %s: a commit before has failed, and none since has succeeded", key)
	}
	err := l.store.read(tasks, key.bytes(), func(value []byte) error {
		var err error
		e, ok, err = found(key, value)
		return err
	})
	if err != nil {
		return Entry{}, false, fmt.Errorf("read task %s: %w", key, err)
	}
	return e, ok, nil
}

// Unfinished returns the attempts without a result, oldest first: the delivered ones are still to run, the started ones
// to observe.
func (l *Ledger) Unfinished() []Entry {
	return l.list(func(e *Entry) bool { return e.State < StateFinished })
}

// Unacked returns the attempts whose result is not acknowledged, oldest first.
func (l *Ledger) Unacked() []Entry {
	return l.list(func(e *Entry) bool { return e.State == StateFinished })
}

// Open returns the number of attempts without an acknowledged result.
func (l *Ledger) Open() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open)
}

// InFlight returns every attempt without an acknowledged result as Hello carries it, at most limit, unfinished ones
// first.
func (l *Ledger) InFlight(limit int) []*commonv1.TaskInFlight {
	entries := append(l.Unfinished(), l.Unacked()...)
	if limit > 0 && len(entries) > limit {
		entries = entries[:limit]
	}
	out := make([]*commonv1.TaskInFlight, len(entries))
	for i := range entries {
		e := &entries[i]
		state := e.Outcome
		switch e.State { //nolint:exhaustive // finished ones have their outcome
		case StateDelivered:
			state = commonv1.TaskState_TASK_STATE_DELIVERED
		case StateStarted:
			state = commonv1.TaskState_TASK_STATE_RUNNING
		}
		out[i] = &commonv1.TaskInFlight{TaskId: e.Key.TaskID, Attempt: e.Key.Attempt, State: state}
	}
	return out
}

func (l *Ledger) list(keep func(*Entry) bool) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Entry, 0, len(l.open))
	for _, e := range l.open {
		if keep(&e) {
			out = append(out, e)
		}
	}
	slices.SortFunc(out, func(a, b Entry) int {
		return cmp.Or(a.DeliveredAt.Compare(b.DeliveredAt), cmp.Compare(a.Key.TaskID, b.Key.TaskID),
			cmp.Compare(a.Key.Attempt, b.Key.Attempt))
	})
	return out
}

func get(tx *transaction, key Key) (Entry, bool, error) {
	return found(key, tx.get(tasks, key.bytes()))
}

// found decodes the value of a key, and reports whether there is one.
func found(key Key, value []byte) (Entry, bool, error) {
	if value == nil {
		return Entry{}, false, nil
	}
	e, err := decode(value)
	if err != nil {
		return Entry{}, false, fmt.Errorf("read task %s: %w", key, err)
	}
	return e, true, nil
}
