package uid

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/jsonfile"
)

const (
	claimLeftover    = ".claim-"
	registerLeftover = ".register-"

	// leftoverAge is longer than any write takes: other agents of the host that are starting write into the same
	// directory.
	leftoverAge = time.Minute
)

// repair removes leftovers of unfinished writes, and repairs or removes claims that cannot be read: one whose id owns
// directories of a workspace becomes that workspace's again, one whose id owns nothing is taken back, and any other
// stays taken. It returns the owners of all ids. It needs the exclusive lock of the table; while others use the table
// it does nothing, returns nil, and leaves the repair to the next start.
func (t *Table) repair() (_ map[int]string, err error) {
	release, err := t.lock(unix.LOCK_EX, 0)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return nil, nil //nolint:nilnil // nothing was read
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	entries, err := os.ReadDir(t.cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("read uid table: %w", err)
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), claimLeftover) && !strings.HasPrefix(entry.Name(), registerLeftover) {
			continue
		}
		if info, err := entry.Info(); err != nil || time.Since(info.ModTime()) < leftoverAge {
			continue // its writer is writing it, or has just renamed it
		}
		if err := os.Remove(filepath.Join(t.cfg.Dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove unfinished uid claim: %w", err)
		}
	}
	owners, err := t.owners(entries)
	if err != nil {
		return nil, err
	}
	for id, owner := range owners {
		if whole(owner) {
			continue
		}
		if err := t.repairClaim(id); err != nil {
			return nil, err
		}
		if owners[id], err = t.owner(id); err != nil {
			return nil, err
		}
	}
	return owners, nil
}

// owners reads the claims among the entries of the directory.
func (t *Table) owners(entries []os.DirEntry) (map[int]string, error) {
	out := make(map[int]string, len(entries))
	for _, entry := range entries {
		id, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if out[id], err = t.owner(id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// whole reports whether a claim's text can be a workspace: neither empty nor cut.
func whole(owner string) bool {
	if owner == "" || strings.ContainsRune(owner, 0) {
		return false
	}
	ofID := func(c rune) bool { return (c >= 'a' && c <= 'f') || (c >= '0' && c <= '9') || c == '-' }
	return len(owner) == 36 || strings.ContainsFunc(owner, func(c rune) bool { return !ofID(c) })
}

// repairClaim repairs, removes or keeps one claim that cannot be read. The caller has locked the table.
func (t *Table) repairClaim(id int) error {
	roots, err := t.roots()
	if err != nil {
		return nil //nolint:nilerr // whose directories to ask cannot be told: the id stays taken
	}
	roots = append(roots, t.cfg.Roots...)
	owners, err := ownersOf(roots, id)
	if err != nil || len(owners) > 1 {
		return err
	}
	running, err := runningUIDs()
	if err != nil {
		return err
	}
	path := filepath.Join(t.cfg.Dir, strconv.Itoa(id))
	if len(owners) == 0 {
		if running[id] {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("take uid back: %w", err)
		}
		return nil
	}
	for owner := range owners { // the only one
		if err := jsonfile.Replace(t.cfg.Dir, strconv.Itoa(id), claimLeftover+"*", []byte(owner)); err != nil {
			return fmt.Errorf("write uid claim: %w", err)
		}
	}
	return nil
}

// ownersOf returns the workspaces that have a directory of that user id in one of the roots.
func ownersOf(roots []string, id int) (map[string]bool, error) {
	out := map[string]bool{}
	for _, root := range roots {
		dirs, err := filepath.Glob(filepath.Join(root, "*", "*"))
		if err != nil {
			return nil, fmt.Errorf("look for the owner of a uid: %w", err)
		}
		for _, dir := range dirs {
			info, err := os.Lstat(dir)
			if err != nil {
				continue // it was removed meanwhile
			}
			workspace := filepath.Base(filepath.Dir(dir))
			if st, ok := info.Sys().(*syscall.Stat_t); ok && info.IsDir() && int(st.Uid) == id && whole(workspace) {
				out[workspace] = true
			}
		}
	}
	return out, nil
}
