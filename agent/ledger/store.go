package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"

	"github.com/gpuaas/mesh/agent/room"
)

// table is one of the store's tables, as records of the journal name it.
type table byte

const (
	tasks   table = 't' // the encoded Entry of each attempt
	fences  table = 'f' // the numbers of each workspace
	foreign table = 'x' // attempts that were signed for another node
)

// bucket returns the name of the table in the file, and nil if there is no such table.
func (t table) bucket() []byte {
	switch t {
	case tasks:
		return bucketTasks
	case fences:
		return bucketFences
	case foreign:
		return bucketForeign
	default:
		return nil
	}
}

// store is the tables of a ledger, in a bbolt file, and the journal of the changes that are not yet in them. A commit
// of bbolt writes whole pages of the trees and syncs twice; a record of the journal has the changes alone, and syncs
// once. The tables get the changes of a whole journal with one commit: when it is full, when the store is opened, and
// when it is closed. Without a journal each commit is one of the tables.
type store struct {
	path    string
	db      *bbolt.DB
	journal *journal  // nil if there was no room for one
	tried   time.Time // when there was no room
	// owed is set when a commit of the tables failed, but reads may show its changes: nothing counts as stored before a
	// commit has succeeded.
	owed  atomic.Bool
	syncs atomic.Int64

	// unsure is set when the last commit of the tables has failed, or was made by an earlier process: the state of the
	// tables as read may not be on disk.
	unsure bool
	shown  int // the number of the last commit in the tables as read while unsure; 0 if it was not read

	reservedTo int64 // how many bytes of the file have blocks

	// mu guards pending. Commits are made one at a time; they alone change it, and read it without the lock.
	mu      sync.RWMutex
	pending map[slot][]byte // changes that are in the journal and not in the tables yet

	// failure returns the error with which a commit of the tables fails before or after it is made. It is nil but in
	// tests.
	failure func(made bool) error
}

// facts are the fields of the file's meta table.
type facts struct {
	ledger, node    string
	format, journal string
	applied         uint64 // the number of the last record that the tables have
}

func readFacts(db *bbolt.DB) (facts, error) {
	var f facts
	err := db.View(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		f = facts{
			ledger: string(meta.Get(keyLedgerID)), node: string(meta.Get(keyNodeID)),
			format: string(meta.Get(keyFormat)), journal: string(meta.Get(keyJournal)),
		}
		if value := meta.Get(keyApplied); len(value) == 8 {
			f.applied = binary.BigEndian.Uint64(value)
		}
		return nil
	})
	if err != nil {
		return facts{}, fmt.Errorf("read task ledger: %w", err)
	}
	return f, nil
}

// openStore puts the changes in the journal into the tables. From then on the file has the format with a journal, which
// a build without journals refuses, until close has put everything into the tables again.
func openStore(path string, db *bbolt.DB) (*store, error) {
	s := &store{path: path, db: db, pending: map[slot][]byte{}}
	return s, s.open()
}

func (s *store) open() error {
	s.reserve()
	// An earlier process may have been killed, or have failed, before its last sync. Then the page cache shows tables that
	// are not on disk, and the tables on disk still need journal records that the cached ones already have. So the journal
	// must not be replaced or written from the front before the tables are on disk.
	s.unsure = true
	if err := s.confirm(); err != nil {
		if !room.IsFull(err) {
			return err
		}
		s.owed.Store(true)
	}
	f, err := readFacts(s.db)
	if err != nil {
		return err
	}
	if f.format != formatJournal {
		return s.beginJournal(f)
	}
	if s.journal, err = openJournal(s.path+journalEnding, f.ledger, f.journal); err != nil {
		return fmt.Errorf("open %s: %w", s.path, err)
	}
	changes, err := s.journal.read(f.applied)
	if err != nil {
		return errors.Join(fmt.Errorf("open %s: %w", s.path, err), s.journal.file.Close())
	}
	for _, c := range changes {
		s.pending[c.slot] = c.value
	}
	err = s.applyPending(formatJournal)
	if room.IsFull(err) { // the journal keeps its records, and takes more as far as they fit
		err = s.journal.file.Sync()
	}
	if err != nil {
		return errors.Join(fmt.Errorf("bring task ledger up to its journal: %w", err), s.journal.file.Close())
	}
	return nil
}

// beginJournal makes a journal for tables that have everything. If the disk has no room for it the store has no
// journal.
func (s *store) beginJournal(f facts) error {
	s.tried = time.Now()
	if s.unsure { // the tables on disk may need the existing journal
		return nil
	}
	j, err := newJournal(s.path+journalEnding, f.ledger)
	if room.IsFull(err) {
		return nil
	}
	if err != nil {
		return err
	}
	s.journal, j.number = j, f.applied
	if err = s.applyPending(formatJournal); err == nil {
		return nil
	}
	if f, readErr := readFacts(s.db); room.IsFull(err) && readErr == nil && f.format == formatJournal {
		s.owed.Store(true) // the tables on disk may not name the journal: no record counts as stored before they do
		return nil
	}
	s.journal = nil
	err = errors.Join(err, j.file.Close())
	if room.IsFull(err) {
		return nil
	}
	return fmt.Errorf("begin journal of task ledger: %w", err)
}

// close puts everything into the tables, and closes the files. If that fails the next openStore finds the rest in the
// journal.
func (s *store) close() error {
	var errs []error
	if s.journal != nil {
		errs = append(errs, s.applyPending(format), s.journal.file.Close())
	}
	return errors.Join(append(errs, s.db.Close())...)
}

// commit makes one transaction of apply. When commit returns nil the changes are on disk; after an error they may be on
// disk or not.
func (s *store) commit(apply func(*transaction) error) error {
	tables, err := s.db.Begin(false)
	if err != nil {
		return fmt.Errorf("read tables: %w", err)
	}
	t := &transaction{tables: tables, pending: s.pending, made: map[slot][]byte{}}
	err = apply(t)
	// The reader is closed before a commit of the tables, which may have to map more of the file than the reader has
	// mapped.
	if err := errors.Join(err, tables.Rollback()); err != nil || len(t.made) == 0 && !s.owed.Load() {
		return err
	}
	if s.journal == nil && time.Since(s.tried) > journalAgain && !s.owed.Load() {
		// A journal that the tables name already is not replaced: they would name one that does not exist.
		if f, err := readFacts(s.db); err == nil && f.format == format {
			_ = s.beginJournal(f) // as without room
		}
	}
	if s.journal == nil {
		return s.update(t.made)
	}
	var payload []byte
	for at, value := range t.made {
		payload = appendChange(payload, at, value)
	}
	if s.owed.Load() || !s.journal.fits(len(payload)) {
		if err := s.applyPending(formatJournal); err != nil {
			return err
		}
	}
	if len(t.made) == 0 {
		return nil
	}
	if !s.journal.fits(len(payload)) { // it is larger than the journal, and the tables have everything else
		return s.update(t.made)
	}
	s.syncs.Add(1)
	if err := s.journal.append(payload); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(s.pending, t.made)
	return nil
}

// journalAgain is how long a store without a journal waits before it tries to make one again.
const journalAgain = time.Minute

// update puts changes into the tables.
func (s *store) update(made map[slot][]byte) error {
	err := s.tables(func(tx *bbolt.Tx) error { return setAll(tx, made) })
	s.owed.Store(err != nil)
	if err == nil {
		s.reserve()
	}
	return err
}

// tables makes one commit of the tables.
func (s *store) tables(apply func(*bbolt.Tx) error) error {
	if err := s.confirm(); err != nil {
		return err
	}
	var err error
	if s.failure != nil {
		err = s.failure(false)
	}
	if err == nil {
		err = s.write(apply)
	}
	return err
}

// errForgotten is returned by a commit after a failed one, once reads of the file show its state from before the failed
// one.
var errForgotten = errors.New("the machine has dropped a page that it could not write: the agent has to start again")

// confirm makes the state of the tables as read durable, if it may not be, by a commit that writes a meta page alone.
// Any other commit after a failed one may write over pages that the tables on disk still use, which bbolt takes for
// free. The error is errForgotten if the page cache has lost the commit that failed.
func (s *store) confirm() error {
	if !s.unsure {
		return nil
	}
	return s.write(func(tx *bbolt.Tx) error {
		if s.shown != 0 && tx.ID() != s.shown+1 { // the free pages in bbolt's memory are those of the lost state
			return errForgotten
		}
		return nil
	})
}

// write makes one commit of the tables, even if the previous one failed.
func (s *store) write(apply func(*bbolt.Tx) error) error {
	s.syncs.Add(2)
	err := s.db.Update(apply)
	if err == nil && s.failure != nil {
		err = s.failure(true)
	}
	if s.unsure = err != nil; err == nil {
		s.shown = 0
		return nil
	}
	if !errors.Is(err, errForgotten) {
		// If this read fails, shown stays as it is.
		_ = s.db.View(func(tx *bbolt.Tx) error { s.shown = tx.ID(); return nil })
	}
	return fmt.Errorf("commit tables: %w", err)
}

// read calls fn with the present value, nil if there is none. The value is valid during the call.
func (s *store) read(from table, key []byte, fn func(value []byte) error) error {
	s.mu.RLock()
	value, ok := s.pending[slot{from, string(key)}]
	s.mu.RUnlock()
	if ok {
		return fn(value)
	}
	// A change that is not pending any more by now was put into the tables before.
	return s.db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(from.bucket())
		if bucket == nil {
			return fn(nil)
		}
		return fn(bucket.Get(key))
	})
}

// each calls fn with the values of a table, first those of the file and then the pending ones, each in the order of
// their keys, until fn returns false. A value is valid during the call.
func (s *store) each(of table, fn func(key, value []byte) (bool, error)) error {
	pending := map[string][]byte{}
	var order []string
	s.mu.RLock()
	for at, value := range s.pending {
		if at.table == of {
			pending[at.key] = value
			order = append(order, at.key)
		}
	}
	s.mu.RUnlock()
	slices.Sort(order)
	more := true
	err := s.db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(of.bucket())
		if bucket == nil {
			return nil
		}
		c := bucket.Cursor()
		for key, value := c.First(); key != nil && more; key, value = c.Next() {
			if _, ok := pending[string(key)]; ok {
				continue
			}
			var err error
			if more, err = fn(key, value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, key := range order {
		if value := pending[key]; value != nil && more {
			if more, err = fn([]byte(key), value); err != nil {
				return err
			}
		}
	}
	return nil
}
