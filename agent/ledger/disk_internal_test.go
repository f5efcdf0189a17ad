package ledger

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/testkit"
)

// metaBytes are the two pages of a bbolt file by which it is read. A commit writes one of them last.
const metaBytes = 2 * 4096

func contents(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// afterPowerLoss writes the files of a ledger as a disk may have them: all pages of the tables as the page cache has
// them, except the meta pages, which were never written. It returns their path.
func afterPowerLoss(t *testing.T, cache, meta, journal []byte) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "l")
	file := append([]byte(nil), cache...)
	copy(file, meta[:metaBytes])
	if err := errors.Join(os.WriteFile(to, file, 0o600), os.WriteFile(to+journalEnding, journal, 0o600)); err != nil {
		t.Fatal(err)
	}
	return to
}

// wantsTasks opens a ledger, and checks that it has count tasks.
func wantsTasks(t *testing.T, path string, count int) {
	t.Helper()
	l, err := Open(Config{Path: path})
	if err != nil {
		t.Fatalf("the tasks that were stored are lost: %v", err)
	}
	defer func() { _ = l.Close() }()
	lost := 0
	for n := range count {
		if !hasTask(t, l, n) {
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("of %d tasks that were stored %d are lost", count, lost)
	}
}

// storeAt opens a store without a ledger, with the failures that a test sets.
func storeAt(t *testing.T, path string, failure func(made bool) error) *store {
	t.Helper()
	db, err := openDB(path, options())
	if err != nil {
		t.Fatal(err)
	}
	s := &store{path: path, db: db, pending: map[slot][]byte{}, failure: failure}
	if err := s.open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.close() })
	return s
}

// full fails a commit as a disk without room for its last page does.
func full(made bool) error {
	if made {
		return unix.ENOSPC
	}
	return nil
}

func (s *store) starts(n int) error {
	d := numbered(n)
	d.Start = true
	return s.commit(func(tx *transaction) error {
		_, err := deliver(tx, &d, time.Now())
		return err
	})
}

// TestACommitAfterOneThatFailedKeepsWhatIsOnDisk checks that a commit of the tables whose last page was not written is
// made durable before another one writes over the pages that it has freed: the disk still uses them.
func TestACommitAfterOneThatFailedKeepsWhatIsOnDisk(t *testing.T) {
	testkit.IO(t)
	for _, count := range []int{50, 300, 1200} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "l")
			l := openAt(t, path)
			for n := range count {
				deliverTo(t, l, numbered(n))
			}
			if err := l.store.applyPending(formatJournal); err != nil {
				t.Fatal(err)
			}
			for n := range 20 {
				deliverTo(t, l, numbered(count+n))
			}
			meta, journal := contents(t, path), contents(t, path+journalEnding)
			l.store.failure = func(made bool) error {
				if made {
					return unix.EIO
				}
				return nil
			}
			l.store.journal.failed = true // the next commit is one of the tables
			if _, err := l.Deliver(t.Context(), numbered(count+20)); !errors.Is(err, unix.EIO) {
				t.Fatal(err)
			}
			var cache []byte
			l.store.failure = func(made bool) error {
				if made && cache == nil {
					cache = contents(t, path)
				}
				return nil
			}
			deliverTo(t, l, numbered(count+20))
			wantsTasks(t, afterPowerLoss(t, cache, meta, journal), count+20)
		})
	}
}

// TestAPageThatTheMachineDropsStopsTheLedger checks that nothing is stored once reads of the file show less than was
// committed: the free pages that bbolt has in memory are not those of the file.
func TestAPageThatTheMachineDropsStopsTheLedger(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	const count = 300
	for n := range count {
		deliverTo(t, l, numbered(n))
	}
	if err := l.store.applyPending(formatJournal); err != nil {
		t.Fatal(err)
	}
	meta, fail := contents(t, path)[:metaBytes], true
	l.store.failure = func(made bool) error {
		if made && fail {
			return unix.EIO
		}
		return nil
	}
	l.store.journal.failed = true
	if _, err := l.Deliver(t.Context(), numbered(count)); !errors.Is(err, unix.EIO) {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt(meta, 0); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	fail = false
	for n := range 10 {
		if _, err := l.Deliver(t.Context(), numbered(count+n)); !errors.Is(err, errForgotten) {
			t.Errorf("a task was stored, or refused for another reason: %v", err)
		}
	}
	wantsTasks(t, killed(t, path), count)
}

// TestNothingIsStoredInAJournalThatTheDiskDoesNotName checks that a record counts only once the tables on disk name its
// journal, whichever earlier commit had no room for its last page.
func TestNothingIsStoredInAJournalThatTheDiskDoesNotName(t *testing.T) {
	testkit.IO(t)
	for _, room := range []int{0, 1} { // commits that have room
		path := filepath.Join(t.TempDir(), "l")
		if err := create(path); err != nil {
			t.Fatal(err)
		}
		commits := 0
		s := storeAt(t, path, func(made bool) error {
			if made {
				commits++
			}
			return full(made && commits > room)
		})
		if err := s.starts(0); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("after %d commits a task was stored as started, which a power loss would forget: %v", room, err)
		}
		s.failure = nil
		if err := errors.Join(s.starts(0), s.close()); err != nil {
			t.Fatal(err)
		}
		wantsTasks(t, path, 1)
	}
}

// TestAJournalIsKeptUntilTheTablesAreOnDisk checks that a process which reads complete tables from the page cache does
// not replace the journal: the previous process may have been killed before its last sync.
func TestAJournalIsKeptUntilTheTablesAreOnDisk(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	for n := range 20 {
		deliverTo(t, l, numbered(n))
	}
	meta := contents(t, path)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	var cache, journal []byte
	storeAt(t, path, func(bool) error {
		if cache == nil {
			cache, journal = contents(t, path), contents(t, path+journalEnding)
		}
		return nil
	})
	wantsTasks(t, afterPowerLoss(t, cache, meta, journal), 20)
}

// TestTheFrontOfAJournalIsKeptUntilTheTablesAreOnDisk checks that a process without room for a commit of the tables
// does not overwrite records that the tables on disk may need: the previous process may have been killed before its
// last sync.
func TestTheFrontOfAJournalIsKeptUntilTheTablesAreOnDisk(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	for n := range 20 {
		deliverTo(t, l, numbered(n))
	}
	meta := contents(t, path)
	var cache string
	l.store.failure = func(made bool) error {
		if made && cache == "" {
			cache = killed(t, path)
		}
		return nil
	}
	l.store.journal.failed = true // the next commit is one of the tables
	deliverTo(t, l, numbered(20))
	s := storeAt(t, cache, full)
	if err := s.starts(21); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a task was stored: %v", err)
	}
	wantsTasks(t, afterPowerLoss(t, contents(t, cache), meta, contents(t, cache+journalEnding)), 20)
}

// TestALedgerIsKeptByAMachineWithoutFiles checks that a ledger is not set aside because the machine has no file
// descriptors to open it.
func TestALedgerIsKeptByAMachineWithoutFiles(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	to := killed(t, path)
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	none := before
	none.Cur = 3
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	_, refused := Open(Config{Path: to, MoveCorruptAside: true})
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(refused, syscall.EMFILE) || errors.Is(refused, ErrCorrupt) {
		t.Errorf("opened without descriptors: %v", refused)
	}
	wantsTasks(t, to, 1)
}
