// Package uid owns the assignment of user ids to the workspaces on this host.
//
// It believes only its directory, in which one file per id names the workspace that has it. It never gives one id to
// two workspaces, and never gives root's or one that the host's user database names. It takes ids back only when all
// are given, and then only those whose workspace has no process and no files left in the agents' directories: an id
// that was never given is the better choice, as a former owner may have left files in other places.
//
// Guarantees: the same workspace gets the same id as long as it has anything on the host; agents that share the
// directory (instances on one host) never give one id twice, because claiming is an exclusive creation and taking back
// excludes every other use of the table. A claim that is empty or cut is repaired by the files that its id owns on the
// host; until then its id is given to no workspace.
package uid

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/room"
	"github.com/gpuaas/mesh/internal/pki"
)

// The range that is used if none is configured.
const (
	DefaultFirst = 200000
	DefaultLast  = 265535
)

// Config sets where assignments are stored and which ids may be given. On a host without root no ids are given: every
// workspace has the agent's own.
type Config struct {
	Dir         string
	First, Last int // inclusive; zeros mean the default range
	Disabled    bool
	// Roots are the directories in which this agent keeps one directory per workspace, named by its id. An id is not taken
	// back while one is there.
	Roots []string
}

// Table assigns ids to workspaces. It is safe for concurrent use, also by several processes.
type Table struct {
	cfg Config

	mu         sync.Mutex
	known      map[string]int
	registered bool
}

// Open makes the directory if need be and reads its files.
func Open(cfg Config) (*Table, error) {
	if cfg.First == 0 && cfg.Last == 0 {
		cfg.First, cfg.Last = DefaultFirst, DefaultLast
	}
	t := &Table{cfg: cfg, known: map[string]int{}}
	if cfg.Disabled {
		return t, nil
	}
	if cfg.First <= 0 || cfg.Last < cfg.First {
		return nil, fmt.Errorf("open uid table: range %d-%d", cfg.First, cfg.Last)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of uid table: %w", err)
	}
	if err := t.register(); err != nil && !room.IsFull(err) {
		return nil, err // on a full disk it is done later, before the first id is given
	}
	owners, err := t.repair()
	if err != nil && !room.IsFull(err) {
		return nil, err
	}
	if owners == nil {
		entries, err := os.ReadDir(cfg.Dir)
		if err != nil {
			return nil, fmt.Errorf("read uid table: %w", err)
		}
		if owners, err = t.owners(entries); err != nil {
			return nil, err
		}
	}
	for id, owner := range owners {
		if whole(owner) {
			t.known[owner] = id
		}
	}
	return t, nil
}

// Enabled reports whether workspaces have ids of their own.
func (t *Table) Enabled() bool { return !t.cfg.Disabled }

// Of returns the id of a workspace, and claims one if it has none. Without root it returns the agent's own.
func (t *Table) Of(workspaceID string) (int, error) {
	if t.cfg.Disabled {
		return os.Getuid(), nil
	}
	if workspaceID == "" {
		return 0, errors.New("claim uid: no workspace")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.register(); err != nil {
		return 0, err
	}
	id, err := t.choose(workspaceID)
	if !errors.Is(err, errFull) {
		return id, err
	}
	if err := t.reclaim(time.Now()); err != nil {
		return 0, err
	}
	return t.choose(workspaceID)
}

var errFull = errors.New("all ids of the range are taken")

// choose returns the id that the workspace has, or claims one.
func (t *Table) choose(workspaceID string) (_ int, err error) {
	release, err := t.lock(unix.LOCK_SH, lockWait)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, release()) }()
	if id, ok := t.known[workspaceID]; ok {
		held, err := t.touch(id, workspaceID)
		if held || err != nil {
			return id, err
		}
		delete(t.known, workspaceID) // another agent took it back
	}
	// The first try is by hash, so that agents that do not share the directory rarely choose the same.
	size := t.cfg.Last - t.cfg.First + 1
	h := fnv.New32a()
	_, _ = h.Write([]byte(workspaceID))
	begin := int(h.Sum32() % uint32(size)) // a range of ids is far below 2^32
	for i := range size {
		id := t.cfg.First + (begin+i)%size
		claimed, err := t.claim(id, workspaceID)
		if err != nil {
			return 0, err
		}
		if claimed {
			t.known[workspaceID] = id
			return id, nil
		}
	}
	return 0, fmt.Errorf("claim uid: %w: %d-%d", errFull, t.cfg.First, t.cfg.Last)
}

// claim writes the file of id under another name and then links it to its own, which fails if the name is taken. It
// returns whether the workspace has the id.
func (t *Table) claim(id int, workspaceID string) (bool, error) {
	path := filepath.Join(t.cfg.Dir, strconv.Itoa(id))
	if owner, err := t.owner(id); err != nil || owner != "" {
		if err != nil || owner != workspaceID {
			return false, err
		}
		return t.touch(id, workspaceID)
	}
	if _, err := user.LookupId(strconv.Itoa(id)); err == nil {
		return false, nil // a user of this host has it
	}
	f, err := os.CreateTemp(t.cfg.Dir, claimLeftover+"*")
	if err != nil {
		return false, fmt.Errorf("claim uid: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.WriteString(workspaceID)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return false, fmt.Errorf("write uid claim: %w", err)
	}
	if err := os.Link(f.Name(), path); err != nil {
		if errors.Is(err, fs.ErrExist) {
			owner, ownerErr := t.owner(id)
			return owner == workspaceID, ownerErr
		}
		return false, fmt.Errorf("name uid claim: %w", err)
	}
	if err := pki.SyncDir(t.cfg.Dir); err != nil {
		return false, fmt.Errorf("sync uid table: %w", err)
	}
	return true, nil
}

func (t *Table) owner(id int) (string, error) {
	text, err := os.ReadFile(filepath.Join(t.cfg.Dir, strconv.Itoa(id)))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read uid claim: %w", err)
	}
	return string(text), nil
}
