package uid_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/uid"
	"github.com/gpuaas/mesh/internal/testkit"
)

// idle makes every id look as if no agent had requested it for unusedFor.
func idle(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Now().Add(-25 * time.Hour)
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		if err := os.Chtimes(filepath.Join(dir, e.Name()), at, at); err != nil {
			t.Fatal(err)
		}
	}
}

func mustOf(t *testing.T, table *uid.Table, ws string) int {
	t.Helper()
	id, err := table.Of(ws)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func mkdir(t *testing.T, path ...string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(path...), 0o700); err != nil {
		t.Fatal(err)
	}
}

// When the whole range has been given, ids whose workspaces have nothing left are given again, and no others.
func TestIDsAreTakenBackWhenAllAreGiven(t *testing.T) {
	testkit.IO(t)
	dir, mine, others := t.TempDir(), t.TempDir(), t.TempDir()
	cfg := uid.Config{Dir: dir, First: 300000, Last: 300003, Roots: []string{mine}}
	table := open(t, cfg)
	other := open(t, uid.Config{Dir: dir, First: cfg.First, Last: cfg.Last, Roots: []string{others}})
	gone, kept, foreign := mustOf(t, table, "gone"), mustOf(t, table, "kept"), mustOf(t, other, "foreign")
	mkdir(t, mine, "kept", "data")
	mkdir(t, others, "foreign", "data")
	mkdir(t, mine, "gone") // empty
	idle(t, dir)
	mustOf(t, table, "fresh") // it has no directory yet
	if again := mustOf(t, table, "gone"); again != gone {
		t.Fatalf("it was taken back though the range was not full: %d, was %d", again, gone)
	}
	if _, err := table.Of("new"); err == nil {
		t.Error("an id that is in use was given again")
	}
	idle(t, dir)
	fresh := mustOf(t, other, "fresh")
	if id := mustOf(t, other, "new"); id != gone {
		t.Errorf("new has %d, want the id %d of which nothing is left", id, gone)
	}
	if _, err := os.Stat(filepath.Join(mine, "gone")); !os.IsNotExist(err) {
		t.Errorf("the empty directory is there still: %v", err)
	}
	for ws, want := range map[string]int{"kept": kept, "foreign": foreign, "fresh": fresh, "new": gone} {
		if id := mustOf(t, table, ws); id != want {
			t.Errorf("%s has %d, had %d", ws, id, want)
		}
	}
	// The agent that gave it must not use its cached entry: the workspace does not get an id that is another's.
	if id, err := table.Of("gone"); err == nil {
		t.Errorf("gone has %d still, which is another's", id)
	}
}

// An id of which a process runs is not given to another workspace, even if its directories are gone.
func TestAnIDOfAProcessIsNotTakenBack(t *testing.T) {
	testkit.IO(t)
	if os.Getuid() != 0 {
		return // no ids are given without root
	}
	cfg := uid.Config{Dir: t.TempDir(), First: 300010, Last: 300010, Roots: []string{t.TempDir()}}
	table := open(t, cfg)
	id := mustOf(t, table, "one")
	cmd := exec.CommandContext(t.Context(), "sleep", "3600")
	// of a small range
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(id), Gid: uint32(id)}}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	idle(t, cfg.Dir)
	if got, err := table.Of("two"); err == nil {
		t.Errorf("%d was given while a process has it", got)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if got := mustOf(t, table, "two"); got != id {
		t.Errorf("two has %d, want %d", got, id)
	}
}

// Agents that all find the range full take back and claim at once, and never give one id twice.
func TestTakingBackExcludesClaiming(t *testing.T) {
	testkit.IO(t)
	cfg := uid.Config{Dir: t.TempDir(), First: 300020, Last: 300027, Roots: []string{t.TempDir()}}
	first := open(t, cfg)
	for i := range 8 {
		mustOf(t, first, fmt.Sprintf("old-%d", i))
	}
	idle(t, cfg.Dir)
	var mu sync.Mutex
	owner := map[int]string{}
	var wg sync.WaitGroup
	for agent := range 4 {
		table := open(t, cfg)
		wg.Go(func() {
			for i := range 2 {
				ws := fmt.Sprintf("new-%d-%d", agent, i)
				id, err := table.Of(ws)
				mu.Lock()
				if other, taken := owner[id]; err != nil || taken {
					t.Errorf("%s has %d of %q: %v", ws, id, other, err)
				}
				owner[id] = ws
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}

// An agent that has locked the table for use keeps the others from taking ids back, not from using theirs.
func TestTheTableIsUsedByManyAtOnce(t *testing.T) {
	testkit.IO(t)
	cfg := uid.Config{Dir: t.TempDir(), First: 300030, Last: 300040, Roots: []string{t.TempDir()}}
	table := open(t, cfg)
	id := mustOf(t, table, "one")
	lock, err := os.Open(filepath.Join(cfg.Dir, ".lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	if again := mustOf(t, table, "one"); again != id {
		t.Errorf("one has %d, had %d", again, id)
	}
}
