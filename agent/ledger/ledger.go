package ledger

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
)

// Retention is how long a result is kept after its task's expiry, acknowledged or not.
const Retention = 24 * time.Hour

// ErrSuperseded is returned by Start for a task of a lower epoch, or a lower op_seq than one already started. The entry
// is unchanged.
var ErrSuperseded = errors.New("a later epoch or operation of the workspace has been seen")

// ErrUnknown is returned for a key that is not in the ledger.
var ErrUnknown = errors.New("the task is not in the ledger")

// ErrNotDelivered is returned by Start for an attempt that is past that state already.
var ErrNotDelivered = errors.New("the task was started before")

// Config sets where the ledger is and which node's.
type Config struct {
	Path string
	// NodeID is the node of the ledger. A file that belongs to no node yet becomes this one's; one of another node is set
	// aside and a new ledger begins: a machine that was imaged from another must neither run nor report that one's tasks.
	// Empty: the file may belong to any node.
	NodeID string
	// MoveCorruptAside renames a file that cannot be read and begins a new ledger, with a new id.
	MoveCorruptAside bool
	// Now is the host's clock, for the moments in entries. Nil means time.Now.
	Now func() time.Time
	// Failed is called with the error of every commit that failed; nil: errors are not passed on.
	Failed func(error)
	// BeforeCommit is called before every commit; its error fails the commit, as a full disk would. Nil: every commit is
	// made.
	BeforeCommit func() error
}

// Ledger is one open file. It is safe for concurrent use.
type Ledger struct {
	store *store
	id    string
	node  string
	moved string
	whose string // the node of the file that was moved aside, if it was another node's
	now   func() time.Time
	gate  func() error
	told  func(error)

	queue   chan *write
	ended   chan struct{}
	closing sync.RWMutex // locked to write while closing, so that no goroutine sends on a closed queue
	closed  bool

	mu    sync.Mutex // guards what follows
	open  map[Key]Entry
	stats Stats
}

// Stats counts the work of a ledger since it was opened.
type Stats struct {
	Commits int64 // transactions
	Fsyncs  int64 // one for each record of the journal, two for each commit of the tables
	Writes  int64 // callers' changes in them
	Open    int   // attempts without an acknowledged result
}

// Open opens the ledger at cfg.Path, or makes one if there is no file. The error is ErrCorrupt, ErrInUse, or of the
// file system.
func Open(cfg Config) (*Ledger, error) {
	if cfg.Path == "" {
		return nil, errors.New("open task ledger: no path")
	}
	if cfg.NodeID != "" { // it becomes part of a file's name
		if _, err := uuid.Parse(cfg.NodeID); err != nil {
			return nil, fmt.Errorf("open task ledger of node %q: %w", cfg.NodeID, err)
		}
	}
	f, err := openFile(cfg.Path, cfg.NodeID, cfg.MoveCorruptAside)
	if err == nil && cfg.NodeID != "" {
		err = f.bind(cfg.NodeID)
	}
	if err != nil {
		return nil, err
	}
	l := &Ledger{
		store: f.store,
		moved: f.moved,
		whose: f.whose,
		now:   cfg.Now,
		gate:  cfg.BeforeCommit,
		told:  cfg.Failed,
		queue: make(chan *write, queueSize),
		ended: make(chan struct{}),
		open:  map[Key]Entry{},
	}
	if l.now == nil {
		l.now = time.Now
	}
	facts, err := readFacts(l.store.db)
	l.id, l.node = facts.ledger, facts.node
	if err == nil {
		err = l.store.each(tasks, func(_, value []byte) (bool, error) {
			e, err := decode(value)
			if err == nil && e.State != StateAcked {
				l.open[e.Key] = e
			}
			return true, err
		})
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read task ledger: %w", err), l.store.close())
	}
	go l.commitLoop()
	return l, nil
}

// Close commits the waiting writes and closes the file. Later writes return ErrClosed.
func (l *Ledger) Close() error {
	l.closing.Lock()
	if l.closed {
		l.closing.Unlock()
		return nil
	}
	l.closed = true
	close(l.queue)
	l.closing.Unlock()
	<-l.ended
	if err := l.store.close(); err != nil {
		return fmt.Errorf("close task ledger: %w", err)
	}
	return nil
}

// ID returns the random id made with the file. Another id than before means that the node's record of its tasks is
// lost.
func (l *Ledger) ID() string { return l.id }

// NodeID returns the node of the ledger; empty as long as the ledger belongs to no node.
func (l *Ledger) NodeID() string { return l.node }

// MovedAside returns the name that a corrupt file, or another node's, was given when this ledger replaced it, else
// empty.
func (l *Ledger) MovedAside() string { return l.moved }

// Foreign returns the node that the file moved aside belongs to; empty if none was moved, or a corrupt one.
func (l *Ledger) Foreign() string { return l.whose }

// Stats returns the counters since Open.
func (l *Ledger) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Fsyncs = l.store.syncs.Load()
	s.Open = len(l.open)
	return s
}

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

// Prune removes at most limit acknowledged attempts whose expiry is more than Retention before now (server time), and
// returns how many it removed.
func (l *Ledger) Prune(ctx context.Context, now time.Time, limit int) (int, error) {
	var old [][]byte
	err := l.store.each(tasks, func(key, value []byte) (bool, error) {
		e, err := decode(value)
		if err == nil && e.State == StateAcked && now.After(e.ExpiresAt.Add(Retention)) {
			old = append(old, slices.Clone(key))
		}
		return len(old) < limit, err
	})
	if err != nil {
		return 0, fmt.Errorf("find old tasks: %w", err)
	}
	if len(old) == 0 {
		return 0, nil
	}
	err = l.submit(ctx, &write{apply: func(tx *transaction) error {
		for _, key := range old {
			tx.remove(tasks, key)
		}
		return nil
	}})
	if err != nil {
		return 0, fmt.Errorf("remove old tasks: %w", err)
	}
	return len(old), nil
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

func put(tx *transaction, e *Entry) { tx.put(tasks, e.Key.bytes(), e.encode()) }
