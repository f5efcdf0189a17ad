package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
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
	store   *store
	id      string
	node    string
	moved   string
	whose   string // the node of the file that was moved aside, if it was another node's
	now     func() time.Time
	gate    func() error
	observe func(error)

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
		store:   f.store,
		moved:   f.moved,
		whose:   f.whose,
		now:     cfg.Now,
		gate:    cfg.BeforeCommit,
		observe: cfg.Failed,
		queue:   make(chan *write, queueSize),
		ended:   make(chan struct{}),
		open:    map[Key]Entry{},
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

func put(tx *transaction, e *Entry) { tx.put(tasks, e.Key.bytes(), e.encode()) }
