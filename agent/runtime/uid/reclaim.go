package uid

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/filelock"
	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
)

const (
	// unusedFor is how long an id must not have been requested before it may be taken back: an agent that requests an id
	// makes its directories within seconds.
	unusedFor = time.Hour

	lockWait  = 10 * time.Second
	lockFile  = ".lock"
	rootsFile = ".roots-"
)

// register records where this agent keeps workspaces' directories, for the agent that takes ids back.
func (t *Table) register() error {
	if t.registered || len(t.cfg.Roots) == 0 {
		return nil
	}
	data, _ := json.Marshal(t.cfg.Roots) // texts are always encoded
	h := fnv.New64a()
	_, _ = h.Write(data)
	path := filepath.Join(t.cfg.Dir, fmt.Sprintf("%s%016x", rootsFile, h.Sum64()))
	// the table's own directory
	if known, err := os.ReadFile(path); err == nil && bytes.Equal(known, data) {
		t.registered = true
		return nil
	}
	if err := jsonfile.Replace(t.cfg.Dir, filepath.Base(path), registerLeftover+"*", data); err != nil {
		return fmt.Errorf("register with uid table: %w", err)
	}
	t.registered = true
	return nil
}

// roots returns the directories of all agents that share the table.
func (t *Table) roots() ([]string, error) {
	files, err := filepath.Glob(filepath.Join(t.cfg.Dir, rootsFile+"*"))
	if err != nil {
		return nil, fmt.Errorf("list agents of uid table: %w", err)
	}
	var out []string
	for _, file := range files {
		data, err := os.ReadFile(file) // the table's own directory
		if err != nil {
			return nil, fmt.Errorf("read agents of uid table: %w", err)
		}
		var roots []string
		if err := json.Unmarshal(data, &roots); err != nil {
			return nil, fmt.Errorf("read agents of uid table %s: %w", file, err)
		}
		out = append(out, roots...)
	}
	return out, nil
}

// lock locks the whole table, shared to use it, exclusive to take ids back, and returns the function that releases it.
// It waits at most so long; the error is unix.EWOULDBLOCK or unix.EINTR while others use the table.
func (t *Table) lock(how int, wait time.Duration) (func() error, error) {
	f, err := filelock.Within(wait, filepath.Join(t.cfg.Dir, lockFile), how)
	if err != nil {
		return nil, fmt.Errorf("lock uid table: %w", err)
	}
	return f.Close, nil
}

// touch notes that the workspace uses its id, and returns whether the id is still its own. The caller has locked the
// table.
func (t *Table) touch(id int, workspaceID string) (bool, error) {
	owner, err := t.owner(id)
	if err != nil || owner != workspaceID {
		return false, err
	}
	now := time.Now()
	if err := os.Chtimes(filepath.Join(t.cfg.Dir, strconv.Itoa(id)), now, now); err != nil {
		return false, fmt.Errorf("note use of uid: %w", err)
	}
	return true, nil
}

// reclaim takes back every id that was not requested for unusedFor and of which no process runs and no agent has a
// directory. If that cannot be determined it takes none back.
func (t *Table) reclaim(now time.Time) (err error) {
	release, err := t.lock(unix.LOCK_EX, lockWait)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	roots, err := t.roots()
	if err != nil || len(roots) == 0 {
		return err
	}
	running, err := runningUIDs()
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(t.cfg.Dir)
	if err != nil {
		return fmt.Errorf("read uid table: %w", err)
	}
	for _, e := range entries {
		id, err := strconv.Atoi(e.Name())
		if err != nil || id < t.cfg.First || id > t.cfg.Last || running[id] {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return fmt.Errorf("read uid claim: %w", err)
		}
		owner, err := t.owner(id)
		if err != nil {
			return err
		}
		if now.Sub(info.ModTime()) < unusedFor || !filepath.IsLocal(owner) {
			continue
		}
		left, err := remains(roots, owner)
		if err != nil {
			return err
		}
		if left {
			continue
		}
		if err := os.Remove(filepath.Join(t.cfg.Dir, e.Name())); err != nil {
			return fmt.Errorf("take uid back: %w", err)
		}
		delete(t.known, owner)
	}
	return nil
}

// remains reports whether any agent has files in a directory of the workspace. It removes an empty directory: the id
// was not requested for unusedFor, so no agent is about to fill it.
func remains(roots []string, workspaceID string) (bool, error) {
	for _, root := range roots {
		err := unix.Rmdir(filepath.Join(root, workspaceID))
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
		case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOTDIR),
			errors.Is(err, unix.EBUSY):
			return true, nil
		default:
			return false, fmt.Errorf("look for what a workspace left: %w", err)
		}
	}
	return false, nil
}

// runningUIDs returns every id that a process of this host has in any role: real, effective, saved, of the file system.
func runningUIDs() (map[int]bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	out := map[int]bool{}
	for _, e := range entries {
		if strings.ContainsFunc(e.Name(), func(c rune) bool { return c < '0' || c > '9' }) {
			continue
		}
		status, err := os.ReadFile(filepath.Join("/proc", e.Name(), "status"))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the process ended meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read process: %w", err)
		}
		lines := strings.Split(string(status), "\n")
		i := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "Uid:") })
		if i < 0 {
			return nil, fmt.Errorf("process %s has no uid", e.Name())
		}
		for _, field := range strings.Fields(lines[i])[1:] {
			id, err := strconv.Atoi(field)
			if err != nil {
				return nil, fmt.Errorf("read uid of process %s: %w", e.Name(), err)
			}
			out[id] = true
		}
	}
	return out, nil
}
