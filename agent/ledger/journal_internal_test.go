package ledger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

func openAt(t *testing.T, path string) *Ledger {
	t.Helper()
	l, err := Open(Config{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func numbered(n int) Delivery {
	return Delivery{
		Key: Key{TaskID: fmt.Sprintf("task-%06d", n), Attempt: 1}, Type: commonv1.TaskType_TASK_TYPE_WORKLOAD_DEPLOY,
		WorkspaceID: fmt.Sprintf("ws-%d", n%7), Epoch: 1, OpSeq: 1, ExpiresAt: time.Now().Add(time.Minute),
		Envelope: bytes.Repeat([]byte("e"), 300),
	}
}

func deliverTo(t *testing.T, l *Ledger, tasks ...Delivery) {
	t.Helper()
	if _, err := l.Deliver(t.Context(), tasks...); err != nil {
		t.Fatal(err)
	}
}

// killed copies the files of a ledger as a kill of its process leaves them, and returns the path of the copy. No commit
// is under way.
func killed(t *testing.T, path string) string {
	t.Helper()
	return killedIn(t, path, t.TempDir())
}

func killedIn(t *testing.T, path, dir string) string {
	t.Helper()
	to := filepath.Join(dir, "l")
	for _, ending := range []string{"", journalEnding} {
		if err := copyFile(to+ending, path+ending); err != nil {
			t.Fatal(err)
		}
	}
	return to
}

// copyFile has the kernel copy a file: the race detector notes each byte that passes through this process, of which the
// files of a ledger have millions.
func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = out.ReadFrom(in)
	return errors.Join(err, out.Close())
}

func hasTask(t *testing.T, l *Ledger, n int) bool {
	t.Helper()
	_, found, err := l.Get(numbered(n).Key)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// changeJournal rewrites the bytes of a journal.
func changeJournal(t *testing.T, path string, change func(data []byte) []byte) {
	t.Helper()
	data, err := os.ReadFile(path + journalEnding)
	if err == nil {
		err = os.WriteFile(path+journalEnding, change(data), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// recordsOf returns where each whole record of a journal begins and ends, from the front of the file.
func recordsOf(t *testing.T, l *Ledger, data []byte) [][2]int {
	t.Helper()
	j := &journal{id: l.store.journal.id}
	var out [][2]int
	for at := headerSize; ; {
		number, _, size := j.record(data[at:])
		if size == 0 || len(out) > 0 && number == 0 {
			return out
		}
		out = append(out, [2]int{at, at + size})
		at += size
	}
}

func formatOf(t *testing.T, path string) string {
	t.Helper()
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	var out string
	err = db.View(func(tx *bbolt.Tx) error {
		out = string(tx.Bucket(bucketMeta).Get(keyFormat))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestARecordIsOnDiskWhenItsWriteReturns checks the flags with which the file is open: a test that kills the process
// cannot find out what the machine has not written to disk.
func TestARecordIsOnDiskWhenItsWriteReturns(t *testing.T) {
	testkit.IO(t)
	l := openAt(t, filepath.Join(t.TempDir(), "l"))
	flags, err := unix.FcntlInt(l.store.journal.file.Fd(), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_DSYNC == 0 {
		t.Errorf("flags %#x, %v", flags, err)
	}
}

// TestAJournalFollowsAKill checks that every write that returned is there after a kill, whether the journal is in its
// first round or in a later one.
func TestAJournalFollowsAKill(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	rounds, before := 0, l.store.journal.at
	for n := range 1500 {
		deliverTo(t, l, numbered(n))
		if l.store.journal.at < before {
			rounds++
		}
		before = l.store.journal.at
		if n%250 != 0 && n != 1499 {
			continue
		}
		again := openAt(t, killed(t, path))
		for k := range n + 1 {
			if !hasTask(t, again, k) {
				t.Fatalf("of %d tasks number %d is not there", n+1, k)
			}
		}
		if got := len(again.Unfinished()); got != n+1 || hasTask(t, again, n+1) {
			t.Fatalf("%d tasks are listed of %d", got, n+1)
		}
	}
	if rounds < 2 {
		t.Errorf("the journal began again %d times", rounds)
	}
	if s := l.Stats(); s.Fsyncs > s.Commits+s.Commits/20+4 {
		t.Errorf("%d syncs for %d commits", s.Fsyncs, s.Commits)
	}
}

// TestARecordThatWasNotSynced checks that a last record that is not whole has no effect.
func TestARecordThatWasNotSynced(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	for n := range 5 {
		deliverTo(t, l, numbered(n))
	}
	data, err := os.ReadFile(path + journalEnding)
	if err != nil {
		t.Fatal(err)
	}
	records := recordsOf(t, l, data)
	last := records[len(records)-1]
	damages := map[string]func([]byte){
		"its end":    func(b []byte) { clear(b[last[1]-40 : last[1]]) },
		"its middle": func(b []byte) { clear(b[last[0]+100 : last[0]+110]) },
		"its head":   func(b []byte) { clear(b[last[0] : last[0]+4]) },
		"one bit":    func(b []byte) { b[last[0]+60] ^= 4 },
		"all of it":  func(b []byte) { clear(b[last[0]:]) },
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			to := killed(t, path)
			changeJournal(t, to, func(b []byte) []byte { damage(b); return b })
			again := openAt(t, to)
			if n := len(again.Unfinished()); n != 4 || hasTask(t, again, 4) {
				t.Errorf("%d tasks are there", n)
			}
			deliverTo(t, again, numbered(4), numbered(5))
			if third := openAt(t, killed(t, to)); len(third.Unfinished()) != 6 {
				t.Errorf("%d tasks are there after that", len(third.Unfinished()))
			}
		})
	}
}

// TestADamagedJournalIsNotRead checks that synced records that cannot be read are an error, which leaves the files as
// they are, or sets both aside.
func TestADamagedJournalIsNotRead(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	for n := range 5 {
		deliverTo(t, l, numbered(n))
	}
	whole, err := os.ReadFile(path + journalEnding)
	if err != nil {
		t.Fatal(err)
	}
	records := recordsOf(t, l, whole)
	other := openAt(t, filepath.Join(t.TempDir(), "other"))
	damages := map[string]func([]byte) []byte{
		"first record":       func(b []byte) []byte { clear(b[records[0][0]:records[0][1]]); return b },
		"middle record":      func(b []byte) []byte { b[records[2][0]+50] ^= 1; return b },
		"length of a record": func(b []byte) []byte { binary.BigEndian.PutUint32(b[records[1][0]:], 1<<30); return b },
		"cut":                func(b []byte) []byte { return b[:len(b)/2] },
		"empty":              func([]byte) []byte { return nil },
		"text":               func([]byte) []byte { return bytes.Repeat([]byte("no journal\n"), 9000) },
		"of another ledger":  func(b []byte) []byte { copy(b[len(journalFormat):], other.ID()); return b },
		"another journal":    func(b []byte) []byte { copy(b[len(journalFormat)+idLength:], other.ID()); return b },
	}
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			to := killed(t, path)
			changeJournal(t, to, damage)
			bad, err := os.ReadFile(to + journalEnding)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 { // the first try leaves no file that the second takes for whole
				if l, err := Open(Config{Path: to}); !errors.Is(err, ErrCorrupt) {
					t.Fatalf("error %v (%v)", err, l)
				}
			}
			if left, err := os.ReadFile(to + journalEnding); err != nil || !bytes.Equal(left, bad) {
				t.Errorf("the journal was changed (%v)", err)
			}
			anew, err := Open(Config{Path: to, MoveCorruptAside: true})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = anew.Close() }()
			if anew.ID() == l.ID() || len(anew.Unfinished()) != 0 {
				t.Errorf("id %s, %d tasks", anew.ID(), len(anew.Unfinished()))
			}
			if left, err := os.ReadFile(anew.MovedAside() + journalEnding); err != nil || !bytes.Equal(left, bad) {
				t.Errorf("the damaged journal was not kept (%v)", err)
			}
		})
	}
	t.Run("missing", func(t *testing.T) {
		to := killed(t, path)
		if err := os.Remove(to + journalEnding); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if l, err := Open(Config{Path: to}); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("error %v (%v)", err, l)
			}
		}
	})
}

// TestAClosedLedgerNeedsNoJournal checks that a build without journals reads a ledger that was closed, and refuses one
// that was not.
func TestAClosedLedgerNeedsNoJournal(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(1))
	if got := formatOf(t, killed(t, path)); got != formatJournal {
		t.Errorf("of a killed one the format is %q", got)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if got := formatOf(t, path); got != format {
		t.Errorf("of a closed one the format is %q", got)
	}
	stale, err := os.ReadFile(path + journalEnding)
	if err != nil {
		t.Fatal(err)
	}
	// This is how a build without journals opens the file.
	db, err := bbolt.Open(path, 0o600, options())
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketTasks).Delete(numbered(1).Key.bytes())
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	for name, journal := range map[string][]byte{"as it was left": stale, "missing": nil, "cut": stale[:journalSize/2]} {
		t.Run(name, func(t *testing.T) {
			if err := os.Remove(path + journalEnding); err != nil {
				t.Fatal(err)
			}
			if journal != nil {
				if err := os.WriteFile(path+journalEnding, journal, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			l := openAt(t, path)
			if hasTask(t, l, 1) {
				t.Error("what a build without journals removed is there again")
			}
			deliverTo(t, l, numbered(2))
			if again := openAt(t, killed(t, path)); !hasTask(t, again, 2) {
				t.Error("what was stored since is not there")
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestAJournalThatCannotBeWritten checks that a commit whose record failed returns an error, that the next ones are
// stored in the tables, and that the failed one does not come after them.
func TestAJournalThatCannotBeWritten(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	file := l.store.journal.file
	readOnly, err := os.Open(path + journalEnding)
	if err != nil {
		t.Fatal(err)
	}
	l.store.journal.file = readOnly
	if _, err := l.Deliver(t.Context(), numbered(1)); err == nil {
		t.Fatal("a record that was not written was reported as stored")
	}
	failed, at := l.store.journal.number, l.store.journal.at
	l.store.journal.file = file
	deliverTo(t, l, numbered(2))
	if err := readOnly.Close(); err != nil {
		t.Fatal(err)
	}
	if again := openAt(t, killed(t, path)); hasTask(t, again, 1) || !hasTask(t, again, 0) || !hasTask(t, again, 2) {
		t.Errorf("there are %v", again.Unfinished())
	}
	// The record is on disk although its write failed.
	late := &journal{file: file, id: l.store.journal.id, at: at, number: failed - 1}
	if err := late.append(appendChange(nil, slot{tasks, string(numbered(2).Key.bytes())}, nil)); err != nil {
		t.Fatal(err)
	}
	if again := openAt(t, killed(t, path)); !hasTask(t, again, 2) {
		t.Error("a record that failed undid what was stored after it")
	}
	deliverTo(t, l, numbered(3))
	if again := openAt(t, killed(t, path)); !hasTask(t, again, 2) || !hasTask(t, again, 3) {
		t.Error("what followed is not there")
	}
}

// TestWhatDoesNotFitTheJournal checks that a commit larger than the journal is stored.
func TestWhatDoesNotFitTheJournal(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	large := numbered(1)
	large.Envelope = make([]byte, journalSize)
	deliverTo(t, l, large)
	deliverTo(t, l, numbered(2))
	again := openAt(t, killed(t, path))
	e, found, err := again.Get(large.Key)
	if err != nil || !found || len(e.Envelope) != journalSize || !hasTask(t, again, 0) || !hasTask(t, again, 2) {
		t.Errorf("there are %v, %v", len(again.Unfinished()), err)
	}
}

// TestAJournalOfAnotherLedgerIsKept: a kill between the moves of a ledger and of its journal leaves the journal alone.
func TestAJournalOfAnotherLedgerIsKept(t *testing.T) {
	testkit.IO(t)
	path := filepath.Join(t.TempDir(), "l")
	l := openAt(t, path)
	deliverTo(t, l, numbered(0))
	to := killed(t, path)
	if err := os.Rename(to, to+".moved"); err != nil {
		t.Fatal(err)
	}
	anew := openAt(t, to)
	if len(anew.Unfinished()) != 0 || anew.ID() == l.ID() {
		t.Errorf("the new ledger has %v", anew.Unfinished())
	}
	if kept, err := filepath.Glob(to + journalEnding + ".of-ledger-" + l.ID() + "-*"); len(kept) != 1 || err != nil {
		t.Errorf("kept %v, %v", kept, err)
	}
}

// TestALedgerWithoutRoomForAJournal checks that an agent whose disk is full opens the ledger of an earlier build, and
// stores tasks in it.
func TestALedgerWithoutRoomForAJournal(t *testing.T) {
	testkit.IO(t)
	dir := testkit.SmallDisk(t, 2<<20)
	path := filepath.Join(dir, "l")
	if err := create(path); err != nil {
		t.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}
	if err := filler.Close(); err != nil {
		t.Fatal(err)
	}
	l := openAt(t, path)
	if l.store.journal != nil {
		t.Fatal("there was room for a journal")
	}
	deliverTo(t, l, numbered(0))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filler.Name()); err != nil {
		t.Fatal(err)
	}
	l = openAt(t, path)
	if l.store.journal == nil || !hasTask(t, l, 0) {
		t.Errorf("with room again: journal %v, task %t", l.store.journal != nil, hasTask(t, l, 0))
	}
	if _, err := os.Stat(path + journalEnding + building); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what was begun without room was left: %v", err)
	}
}

// TestLedgerModel draws lives of tasks with kills and restarts between them, and compares the ledger with the results
// of its calls.
func TestLedgerModel(t *testing.T) {
	testkit.IO(t)
	rapid.Check(t, func(rt *rapid.T) {
		path := filepath.Join(t.TempDir(), "l")
		l := openAt(t, path)
		defer func() { _ = l.Close() }()
		want := map[int]State{}
		abandoned := map[int]bool{}
		pick := func() int {
			known := slices.Sorted(maps.Keys(want))
			if len(known) == 0 {
				return 0
			}
			return rapid.SampledFrom(known).Draw(rt, "task")
		}
		steps := rapid.IntRange(5, 60).Draw(rt, "steps")
		for n := range steps {
			switch rapid.IntRange(0, 7).Draw(rt, "step") {
			case 0, 1:
				d := numbered(n)
				d.Envelope = make([]byte, rapid.IntRange(0, 30_000).Draw(rt, "bytes"))
				d.Start = rapid.Bool().Draw(rt, "start")
				deliverTo(t, l, d)
				want[n] = StateDelivered
				if d.Start {
					want[n] = StateStarted
				}
			case 2:
				n := pick()
				if _, err := l.Start(t.Context(), numbered(n).Key); (err == nil) != (want[n] == StateDelivered) {
					rt.Fatalf("start of %d at %v: %v", n, want[n], err)
				}
				if want[n] == StateDelivered {
					want[n] = StateStarted
				}
			case 3:
				n := pick()
				_, err := l.Finish(t.Context(), numbered(n).Key, commonv1.TaskState_TASK_STATE_SUCCEEDED, []byte("result"))
				if (err == nil) != (want[n] != 0) {
					rt.Fatalf("result of %d at %v: %v", n, want[n], err)
				}
				if want[n] != 0 && want[n] < StateFinished {
					want[n] = StateFinished
				}
			case 4:
				n := pick()
				if want[n] == StateFinished {
					if err := errors.Join(l.Ack(t.Context(), numbered(n).Key),
						l.Abandon(t.Context(), Key{TaskID: "none", Attempt: 1})); err != nil {
						rt.Fatal(err)
					}
					want[n] = StateAcked
				}
			case 5:
				n := pick()
				if err := l.Abandon(t.Context(), numbered(n).Key); err != nil {
					rt.Fatal(err)
				}
				if want[n] != 0 {
					delete(want, n)
					abandoned[n] = true
				}
			case 6:
				if err := l.Close(); err != nil {
					rt.Fatal(err)
				}
				l = openAt(t, path)
			case 7:
				path = killed(t, path)
				_ = l.Close()
				l = openAt(t, path)
			}
			got := map[int]State{}
			for k := range steps {
				e, found, err := l.Get(numbered(k).Key)
				if err != nil {
					rt.Fatal(err)
				}
				if found {
					got[k] = e.State
				}
			}
			if !maps.Equal(got, want) {
				rt.Fatalf("there are %v, want %v", got, want)
			}
			if kept, err := l.Abandoned(); err != nil || len(kept) != len(abandoned) {
				rt.Fatalf("disowned: %d of %d, %v", len(kept), len(abandoned), err)
			}
		}
		pruned, err := l.Prune(t.Context(), time.Now().AddDate(1, 0, 0), 1000)
		acked := 0
		for _, s := range want {
			if s == StateAcked {
				acked++
			}
		}
		if err != nil || pruned != acked {
			rt.Fatalf("pruned %d of %d, %v", pruned, acked, err)
		}
		if again, err := l.Prune(t.Context(), time.Now().AddDate(1, 0, 0), 1000); err != nil || again != 0 {
			rt.Fatalf("pruned %d again, %v", again, err)
		}
	})
}
