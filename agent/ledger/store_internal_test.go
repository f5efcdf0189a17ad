package ledger

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestACommitOfTheTablesThatFailedAtItsEnd checks that, before a commit of the tables has succeeded, no record is
// written behind records that the tables may have, and no call returns an entry because reads of the tables show it.
func TestACommitOfTheTablesThatFailedAtItsEnd(t *testing.T) {
	testkit.IO(t)
	broken := errors.New("the disk failed")
	for name, c := range map[string]struct {
		size int // of the commit that fails
		full bool
		none bool
	}{
		"the journal had no room for it":          {size: 8000, full: true},
		"the commit was greater than the journal": {size: journalSize},
		"there was no room for a journal":         {none: true},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "l")
			l := openAt(t, path)
			deliverTo(t, l, numbered(0))
			if c.full { // for larger ones
				l.store.journal.at = journalSize - 6000
			}
			if c.none {
				if err := errors.Join(l.store.applyPending(format), l.store.journal.file.Close()); err != nil {
					t.Fatal(err)
				}
				l.store.journal, l.store.tried = nil, time.Now()
			}
			d := numbered(1)
			d.Start, d.WorkspaceID, d.OpSeq, d.Envelope = true, numbered(0).WorkspaceID, 5, make([]byte, c.size)
			failing := true
			l.store.failure = func(made bool) error {
				if failing && made {
					return broken
				}
				return nil
			}
			if _, err := l.Deliver(t.Context(), d); !errors.Is(err, broken) {
				t.Fatalf("error %v", err)
			}
			for n := range 3 { // commits that fit in the journal as well
				if _, err := l.Deliver(t.Context(), numbered(2+n)); !errors.Is(err, broken) {
					t.Fatalf("stored while the disk fails: %v", err)
				}
			}
			if _, err := l.Deliver(t.Context(), d); !errors.Is(err, broken) {
				t.Errorf("answered as known without a sync: %v", err)
			}
			if e, found, err := l.Get(d.Key); err == nil {
				t.Errorf("read without a sync: %v, %t", e.State, found)
			}
			failing = false
			before := l.Stats().Fsyncs
			if out, err := l.Deliver(t.Context(), d); err != nil || l.Stats().Fsyncs == before {
				t.Fatalf("%v, %v, %d syncs", out, err, l.Stats().Fsyncs-before)
			}
			earlier := numbered(9)
			earlier.Start, earlier.WorkspaceID, earlier.OpSeq = true, d.WorkspaceID, 3
			if out, err := l.Deliver(t.Context(), earlier); err != nil || !out[0].Superseded {
				t.Errorf("a lower op_seq was taken: %+v, %v", out, err)
			}
			deliverTo(t, l, numbered(5), numbered(6))
			again := openAt(t, killed(t, path))
			for _, n := range []int{0, 1, 5, 6, 9} {
				if !hasTask(t, again, n) {
					t.Errorf("task %d is not there", n)
				}
			}
			if epoch, opSeq, err := again.Fence(d.WorkspaceID); err != nil || epoch != 1 || opSeq != 5 {
				t.Errorf("fence %d, %d, %v", epoch, opSeq, err)
			}
		})
	}
}

// TestALedgerOnAFullDisk checks that results of many tasks are stored on a disk that is full, and that the ledger is
// closed and opened there.
func TestALedgerOnAFullDisk(t *testing.T) {
	testkit.IO(t)
	const tasks = 3000
	dir := testkit.SmallDisk(t, 16<<20)
	path := filepath.Join(dir, "l")
	l := openAt(t, path)
	for some := range slices.Chunk(slices.Collect(func(yield func(int) bool) {
		for n := range tasks {
			if !yield(n) {
				return
			}
		}
	}), 100) {
		var all []Delivery
		for _, n := range some {
			all = append(all, numbered(n))
		}
		deliverTo(t, l, all...)
	}
	empty := testkit.Fill(t, dir)
	stored, most := 0, int64(0)
	for _, n := range rand.New(rand.NewPCG(1, 2)).Perm(tasks) {
		before := l.Stats().Fsyncs
		if _, err := l.Finish(t.Context(), numbered(n).Key, commonv1.TaskState_TASK_STATE_SUCCEEDED,
			[]byte("result")); err != nil {
			t.Log(err)
			break
		}
		stored++
		most = max(most, l.Stats().Fsyncs-before)
	}
	if most > 200 { // the journal holds some hundred values when the tables take them
		t.Errorf("one result took %d syncs", most)
	}
	if stored < 1500 { // each entry grows by its result, and pages split, so the room ends at some point
		t.Errorf("%d results were stored", stored)
	}
	for range 2 {
		if err := l.Close(); err != nil && !room.IsFull(err) {
			t.Fatal(err)
		}
		l = openAt(t, path)
		if got := len(l.Unacked()); got < stored {
			t.Errorf("%d results are there of %d", got, stored)
		}
	}
	empty()
	deliverTo(t, l, numbered(tasks))
	if again := openAt(t, killedIn(t, path, t.TempDir())); !hasTask(t, again, tasks) || len(again.Unacked()) < stored {
		t.Errorf("%d results are there", len(again.Unacked()))
	}
}

// TestALedgerOpensWithoutRoom checks that a ledger whose tables have no room for the changes in its journal can be
// opened, has all of them, and stores more as far as the journal has room.
func TestALedgerOpensWithoutRoom(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	for n := range 20 {
		deliverTo(t, l, numbered(n))
	}
	for name, shown := range map[string]bool{
		"nothing of the commit is in the file": false,
		"the commit is in the file":            true,
	} {
		t.Run(name, func(t *testing.T) {
			to := killed(t, path)
			db, err := openDB(to, options())
			if err != nil {
				t.Fatal(err)
			}
			full := true
			s := &store{path: to, db: db, pending: map[slot][]byte{}, failure: func(made bool) error {
				if full && made == shown {
					return unix.ENOSPC
				}
				return nil
			}}
			if err := s.open(); err != nil {
				t.Fatal(err)
			}
			store := func(n int) error {
				d := numbered(n)
				return s.commit(func(tx *transaction) error {
					_, err := deliver(tx, &d, time.Now())
					return err
				})
			}
			if err := store(20); (err != nil) != shown { // the changes that the tables may have must be on disk first
				t.Errorf("a task that the journal has room for: %v", err)
			}
			full = false
			if err := store(21); err != nil {
				t.Error(err)
			}
			again := openAt(t, killed(t, to))
			for n := range 22 {
				if !hasTask(t, again, n) && (n != 20 || !shown) {
					t.Errorf("task %d is not there", n)
				}
			}
			if err := s.close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAJournalComesWithRoom checks that a ledger that was opened without room for a journal makes one later.
func TestAJournalComesWithRoom(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	if err := errors.Join(l.store.applyPending(format), l.store.journal.file.Close()); err != nil {
		t.Fatal(err)
	}
	l.store.journal, l.store.tried = nil, time.Now()
	deliverTo(t, l, numbered(1))
	if l.store.journal != nil {
		t.Error("it looks for room with each commit")
	}
	l.store.tried = time.Now().Add(-journalAgain - time.Second)
	deliverTo(t, l, numbered(2))
	if l.store.journal == nil || l.store.journal.at == headerSize {
		t.Fatal("it has no journal")
	}
	deliverTo(t, l, numbered(3))
	if again := openAt(t, killed(t, path)); len(again.Unfinished()) != 4 {
		t.Errorf("there are %d", len(again.Unfinished()))
	}
	// A commit of the tables that failed when the journal was begun may have named it.
	if err := errors.Join(l.store.applyPending(formatJournal), l.store.journal.file.Close()); err != nil {
		t.Fatal(err)
	}
	l.store.journal, l.store.tried = nil, time.Now().Add(-journalAgain-time.Second)
	deliverTo(t, l, numbered(4))
	if l.store.journal != nil {
		t.Error("a journal that the tables name was replaced")
	}
	if again := openAt(t, killed(t, path)); len(again.Unfinished()) != 5 {
		t.Errorf("there are %d", len(again.Unfinished()))
	}
}

// TestALedgerThatWasPutBack: the tables of a closed ledger are restored beside a later journal, which they do not name.
func TestALedgerThatWasPutBack(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	l = openAt(t, path)
	for n := range 40 {
		deliverTo(t, l, numbered(1+n))
	}
	later := killed(t, path)
	if err := os.WriteFile(later, data, 0o600); err != nil {
		t.Fatal(err)
	}
	l = openAt(t, later)
	deliverTo(t, l, numbered(50))
	if again := openAt(t, killed(t, later)); len(again.Unfinished()) != 2 {
		t.Errorf("there are %d tasks of 2", len(again.Unfinished()))
	}
}

// TestAnotherNodesLedgerIsNotRead: the ledger of a machine that was imaged while its agent ran is set aside as the
// other node's, also without its journal.
func TestAnotherNodesLedgerIsNotRead(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	owner, node := uuid.NewString(), uuid.NewString()
	l, err := Open(Config{Path: path, NodeID: owner})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	deliverTo(t, l, numbered(0))
	for name, without := range map[string]bool{"both files": false, "without its journal": true} {
		t.Run(name, func(t *testing.T) {
			to := killed(t, path)
			if without {
				if err := os.Remove(to + journalEnding); err != nil {
					t.Fatal(err)
				}
			}
			anew, err := Open(Config{Path: to, NodeID: node})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = anew.Close() }()
			if anew.Foreign() != owner || len(anew.Unfinished()) != 0 || anew.NodeID() != node {
				t.Errorf("foreign %q, node %q, %v", anew.Foreign(), anew.NodeID(), anew.Unfinished())
			}
			if !without {
				if old := openAt(t, anew.MovedAside()); !hasTask(t, old, 0) {
					t.Error("what was set aside lacks its journal")
				}
			}
		})
	}
}
