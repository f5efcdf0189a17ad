package ledger

import (
	"cmp"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"slices"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
)

// applyPending puts the pending changes into the tables, with the format that the file has from then on, and begins the
// journal again.
func (s *store) applyPending(as string) error {
	over := func(tx *bbolt.Tx) error {
		meta := tx.Bucket(bucketMeta)
		return errors.Join(meta.Put(keyApplied, binary.BigEndian.AppendUint64(nil, s.journal.number)),
			meta.Put(keyJournal, []byte(s.journal.id)), meta.Put(keyFormat, []byte(as)))
	}
	err := s.tables(func(tx *bbolt.Tx) error { return errors.Join(setAll(tx, s.pending), over(tx)) })
	if room.IsFull(err) {
		err = s.applyInPieces(over)
	}
	if err != nil {
		// If reads of the tables show the failed commit, then after a kill the tables may name these records as applied: no
		// further record may be written behind them.
		f, readErr := readFacts(s.db)
		if len(s.pending) > 0 && (readErr != nil || f.applied == s.journal.number) {
			s.owed.Store(true)
		}
		return err
	}
	s.owed.Store(false)
	s.journal.begin()
	s.reserve()
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.pending)
	return nil
}

// applyInPieces puts the pending changes into the tables with few free pages: each commit has a piece of them, half as
// large as the one for which there was no room, and frees the old versions of the pages that it writes. Until the last
// commit the file does not count the journal's records as applied; after a crash they set the same values again.
func (s *store) applyInPieces(over func(*bbolt.Tx) error) error {
	order := slices.SortedFunc(maps.Keys(s.pending),
		func(a, b slot) int { return cmp.Or(cmp.Compare(a.table, b.table), cmp.Compare(a.key, b.key)) })
	for size := halved(len(order)); len(order) > 0; {
		piece := order[:min(size, len(order))]
		err := s.tables(func(tx *bbolt.Tx) error {
			for _, at := range piece {
				if err := set(tx, at, s.pending[at]); err != nil {
					return err
				}
			}
			return nil
		})
		switch {
		case err == nil:
			order = order[len(piece):]
		case room.IsFull(err) && len(piece) > 1:
			size = halved(len(piece))
		default:
			return err
		}
	}
	return s.tables(over)
}

func halved(n int) int { return (n + 1) / 2 }

// reserved is how many bytes beyond those in use the file is given, once it has half of that or less: room for some
// hundred small tasks.
const reserved = 1 << 20

// reserve allocates blocks to the file beyond those in use, so that tasks can be stored and removed on a full disk. The
// length of the file stays. On a file system that cannot do this, or has no room, the file stays as it is.
func (s *store) reserve() {
	var used int64
	err := s.db.View(func(tx *bbolt.Tx) error {
		used = tx.Size()
		return nil
	})
	if err != nil || used+reserved/2 <= s.reservedTo {
		return
	}
	file, err := os.OpenFile(s.path, os.O_WRONLY, 0) // the agent's own state directory
	if err != nil {
		return
	}
	if err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, used+reserved); err == nil {
		s.reservedTo = used + reserved
	}
	_ = file.Close()
}

func setAll(tx *bbolt.Tx, changes map[slot][]byte) error {
	for at, value := range changes {
		if err := set(tx, at, value); err != nil {
			return err
		}
	}
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
