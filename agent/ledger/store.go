package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
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

// store is the tables of a ledger, in a bbolt file, and the journal of what is not yet in them. A commit of bbolt writes whole pages of the trees and
// syncs twice; a record of the journal has the changes alone, and syncs once. The tables get the changes of a whole journal with one commit: when it is
// full, when the store is opened, and when it is closed. Without a journal each commit is one of the tables.
type store struct {
	db      *bbolt.DB
	journal *journal // nil if there was no room for one
	syncs   atomic.Int64

	mu   sync.RWMutex // guards held; commits are made by one goroutine
	held map[slot][]byte
}

// openStore puts what the journal has into the tables. From then on the file's format says that the journal belongs to it, which a build without journals
// refuses, until close has put everything into the tables again.
func openStore(path string, db *bbolt.DB) (*store, error) {
	s := &store{db: db, held: map[slot][]byte{}}
	var id, was string
	var applied uint64
	err := db.View(func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		id, was = string(meta.Get(keyLedgerID)), string(meta.Get(keyFormat))
		if value := meta.Get(keyApplied); len(value) == 8 {
			applied = binary.BigEndian.Uint64(value)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read task ledger: %w", err)
	}
	j, err := openJournal(path+journalEnding, id, was == formatJournal)
	if was != formatJournal && noRoom(err) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	s.journal = j
	var changes []change
	if was == formatJournal {
		if changes, applied, err = j.read(applied); err != nil {
			return nil, errors.Join(fmt.Errorf("open %s: %w", path, err), j.file.Close())
		}
	}
	for _, c := range changes {
		s.held[c.slot] = c.value
	}
	j.begin(applied)
	if err := s.settle(nil, formatJournal); err != nil {
		return nil, errors.Join(fmt.Errorf("bring task ledger up to its journal: %w", err), j.file.Close())
	}
	return s, nil
}

func noRoom(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// close puts everything into the tables, and closes the files. If that fails the journal has the rest, for the next openStore.
func (s *store) close() error {
	var errs []error
	if s.journal != nil {
		errs = append(errs, s.settle(nil, format), s.journal.file.Close())
	}
	return errors.Join(append(errs, s.db.Close())...)
}

// transaction is a commit that is being made: it reads the tables with what is held and what it has changed itself.
type transaction struct {
	tables *bbolt.Tx
	held   map[slot][]byte
	made   map[slot][]byte
}

// get returns a value, which is good until the transaction ends, and nil if there is none.
func (t *transaction) get(from table, key []byte) []byte {
	at := slot{from, string(key)}
	if value, ok := t.made[at]; ok {
		return value
	}
	if value, ok := t.held[at]; ok {
		return value
	}
	if bucket := t.tables.Bucket(from.bucket()); bucket != nil {
		return bucket.Get(key)
	}
	return nil
}

// put sets a value. It keeps value, which is not nil.
func (t *transaction) put(to table, key, value []byte) { t.made[slot{to, string(key)}] = value }

func (t *transaction) remove(from table, key []byte) { t.made[slot{from, string(key)}] = nil }

// commit makes one transaction of apply. What it has changed is on disk when commit returns without an error; with one it may be there or not.
func (s *store) commit(apply func(*transaction) error) error {
	tables, err := s.db.Begin(false)
	if err != nil {
		return fmt.Errorf("read tables: %w", err)
	}
	t := &transaction{tables: tables, held: s.held, made: map[slot][]byte{}}
	err = apply(t)
	// Before a commit of the tables, which may have to map more of the file than a reader has.
	if err := errors.Join(err, tables.Rollback()); err != nil || len(t.made) == 0 {
		return err
	}
	if s.journal == nil {
		return s.settle(t.made, format)
	}
	var payload []byte
	for at, value := range t.made {
		payload = appendChange(payload, at, value)
	}
	if !s.journal.fits(len(payload)) {
		return s.settle(t.made, formatJournal)
	}
	s.syncs.Add(1)
	if err := s.journal.append(payload); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.Copy(s.held, t.made)
	return nil
}

// settle puts what is held, and then made, into the tables, with the format that the file has from then on.
func (s *store) settle(made map[slot][]byte, as string) error {
	s.syncs.Add(2)
	err := s.db.Update(func(tx *bbolt.Tx) error {
		for _, changes := range []map[slot][]byte{s.held, made} {
			for at, value := range changes {
				if err := set(tx, at, value); err != nil {
					return err
				}
			}
		}
		meta := tx.Bucket(bucketMeta)
		if s.journal == nil {
			return nil
		}
		if err := meta.Put(keyApplied, binary.BigEndian.AppendUint64(nil, s.journal.number)); err != nil {
			return err
		}
		return meta.Put(keyFormat, []byte(as))
	})
	if err != nil {
		return fmt.Errorf("commit tables: %w", err)
	}
	if s.journal != nil {
		s.journal.begin(s.journal.number)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.held)
	return nil
}

func set(tx *bbolt.Tx, at slot, value []byte) error {
	bucket, err := tx.CreateBucketIfNotExists(at.table.bucket())
	if err != nil {
		return err
	}
	if value == nil {
		return bucket.Delete([]byte(at.key))
	}
	return bucket.Put([]byte(at.key), value)
}

// read calls fn with a value as it is now, and nil if there is none. The value is good during the call.
func (s *store) read(from table, key []byte, fn func(value []byte) error) error {
	s.mu.RLock()
	value, ok := s.held[slot{from, string(key)}]
	s.mu.RUnlock()
	if ok {
		return fn(value)
	}
	// What left held meanwhile was in the tables before.
	return s.db.View(func(tx *bbolt.Tx) error {
		bucket := tx.Bucket(from.bucket())
		if bucket == nil {
			return fn(nil)
		}
		return fn(bucket.Get(key))
	})
}

// each calls fn with the values of a table, first those of the file and then those that are held, each in the order of their keys, until fn returns false.
// A value is good during the call.
func (s *store) each(of table, fn func(key, value []byte) (bool, error)) error {
	held := map[string][]byte{}
	var order []string
	s.mu.RLock()
	for at, value := range s.held {
		if at.table == of {
			held[at.key] = value
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
			if _, ok := held[string(key)]; ok {
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
		if value := held[key]; value != nil && more {
			if more, err = fn([]byte(key), value); err != nil {
				return err
			}
		}
	}
	return nil
}
