package scratch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	prefix   = "gpuaas-"
	lockName = ".scratch.lock"
	// marker is the beginning of a lock file.
	marker = "gpuaas scratch directory"
)

// Dir is a temporary directory that this process owns.
type Dir struct {
	path string
	lock *os.File
}

// held are the directories of this process. A forced stop must remove all of them, whichever package made them.
var held = struct {
	mu   sync.Mutex
	dirs map[*Dir]struct{}
}{dirs: map[*Dir]struct{}{}}

// Held returns the directories that this process has made and not removed.
func Held() []*Dir {
	held.mu.Lock()
	defer held.mu.Unlock()
	return slices.Collect(maps.Keys(held.dirs))
}

// Make makes a directory for a kind of owner below the system's temporary directory, which others may traverse and not
// list. The caller removes it; after a sudden death of the caller Sweep does.
func Make(kind string) (*Dir, error) {
	path, err := os.MkdirTemp("", prefix+kind+"-*")
	if err != nil {
		return nil, fmt.Errorf("make temporary directory: %w", err)
	}
	if path, err = filepath.Abs(path); err != nil {
		return nil, fmt.Errorf("find temporary directory: %w", err)
	}
	d := &Dir{path: path}
	held.mu.Lock()
	held.dirs[d] = struct{}{}
	held.mu.Unlock()
	if err := d.own(); err != nil {
		return nil, errors.Join(err, d.Remove())
	}
	return d, nil
}

// own gives the directory its lock file. The file gets its name once it is locked and marked, so that a sweeper never
// finds an unlocked one of a live owner.
func (d *Dir) own() error {
	if err := os.Chmod(d.path, 0o711); err != nil { // servers and workloads of other users pass through
		return fmt.Errorf("open temporary directory to traversal: %w", err)
	}
	unnamed := filepath.Join(d.path, lockName+".new")
	var err error
	if d.lock, err = os.OpenFile(unnamed, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600); err != nil {
		return fmt.Errorf("lock temporary directory: %w", err)
	}
	if err := syscall.Flock(int(d.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("lock temporary directory: %w", err)
	}
	if _, err := fmt.Fprintf(d.lock, "%s\npid %d\n", marker, os.Getpid()); err != nil {
		return fmt.Errorf("lock temporary directory: %w", err)
	}
	if err := os.Rename(unnamed, filepath.Join(d.path, lockName)); err != nil {
		return fmt.Errorf("lock temporary directory: %w", err)
	}
	return nil
}

// Path returns the absolute path.
func (d *Dir) Path() string { return d.path }

// removeWithin is how long Remove tries: a process that runs in the directory may add files until it has ended.
const removeWithin = 5 * time.Second

// Remove removes the directory with everything in it, then releases the lock. Removing it again changes nothing.
func (d *Dir) Remove() error {
	err := removeAll(d.path)
	if err == nil {
		held.mu.Lock()
		delete(held.dirs, d)
		held.mu.Unlock()
	}
	if d.lock != nil {
		err = errors.Join(err, ignoreClosed(d.lock.Close()))
	}
	return err
}

func ignoreClosed(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// removeAll removes a directory, again for as long as something is added meanwhile. Its lock file goes last: if we die
// before, the next sweep finds it.
func removeAll(path string) error {
	deadline := time.Now().Add(removeWithin)
	for {
		err := removeOnce(path)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-time.After(20 * time.Millisecond)
	}
}

func removeOnce(path string) error {
	entries, err := os.ReadDir(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("list directory: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.Name() != lockName {
			errs = append(errs, os.RemoveAll(filepath.Join(path, e.Name())))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// End ends the processes that a dead owner has left running in a directory.
type End func(ctx context.Context, dir string) error

// Sweep removes the directories of the kinds that dead owners have left, after end has ended what still runs in each,
// and returns their paths. A directory that cannot be removed is logged and left for the next sweep.
func Sweep(ctx context.Context, logger *slog.Logger, end End, kinds ...string) []string {
	var removed []string
	for _, kind := range kinds {
		paths, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+kind+"-*"))
		if err != nil {
			continue // a pattern that is wrong finds nothing
		}
		for _, path := range paths {
			if ctx.Err() != nil {
				return removed
			}
			gone, err := sweepOne(ctx, path, end)
			switch {
			case err != nil:
				logger.WarnContext(ctx, "directory of a dead process was not removed",
					slog.String("dir", path), slog.Any("error", err))
			case gone:
				logger.InfoContext(ctx, "removed the directory of a dead process", slog.String("dir", path))
				removed = append(removed, path)
			}
		}
	}
	return removed
}

// sweepOne removes a directory if it is ours and its owner is dead.
func sweepOne(ctx context.Context, path string, end End) (bool, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return false, fmt.Errorf("find directory: %w", err)
	}
	if !ours(path, os.ModeDir) {
		return false, nil
	}
	name := filepath.Join(path, lockName)
	if !ours(name, 0) {
		return false, nil
	}
	lock, err := os.OpenFile(name, os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open lock: %w", err)
	}
	defer lock.Close()
	head := make([]byte, len(marker))
	if _, err := io.ReadFull(lock, head); err != nil || !strings.HasPrefix(string(head), marker) {
		return false, nil // not a lock of ours
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return false, nil // its owner lives, or another process sweeps it
	}
	// Another sweeper may have removed the directory between our opening and our lock.
	held, err := lock.Stat()
	if err != nil {
		return false, fmt.Errorf("inspect lock: %w", err)
	}
	if named, err := os.Lstat(name); err != nil || !os.SameFile(held, named) {
		return false, nil
	}
	if end != nil {
		if err := end(ctx, path); err != nil {
			return false, err
		}
	}
	return true, removeAll(path)
}

// ours reports whether a path is a file of the given kind, not a link to one, that belongs to our user.
func ours(path string, kind os.FileMode) bool {
	info, err := os.Lstat(path)
	if err != nil || info.Mode().Type() != kind {
		return false
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Getuid()
}
