// Package room watches whether the directories that an agent writes to have room, and keeps a small reserve for the
// files that the agent must be able to write.
//
// It believes the kernel's figures, the errors of the agent's writers, and a write of its own. It decides nothing about
// workspaces and removes nothing but its own reserve and its own probe.
//
// Guarantees: a directory counts as full when its file system is below the low mark, or when a writer was refused for
// want of room; it has room again only above a higher mark, and once a write of this package's own was taken.
package room

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	mebi = 1 << 20

	// The low mark is a part of the file system, within these bounds. Above twice the mark there is room again.
	markPart  = 64
	leastMark = mebi
	mostMark  = 64 * mebi

	leastFiles = 64 // inodes, where the file system counts them

	probeFile = ".room-probe"
	probeSize = 64 << 10
)

// IsFull reports whether err means that a file system, or a quota on it, has no room.
func IsFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Usage is the size of a file system and what is free of it.
type Usage struct {
	SizeBytes, FreeBytes int64
	Files, FreeFiles     int64 // Files is zero where inodes are not counted
}

// State is the result of a check for room. The zero State has room.
type State struct {
	Usage

	Full   bool
	Dir    string    // the directory without room, or the first that is watched
	Since  time.Time // when Full last changed
	Detail string    // why the directory counts as full
}

// Config sets which directories are watched. Nil functions are those of the host.
type Config struct {
	Dirs []string // the first is the state directory, which holds the probe
	Now  func() time.Time
	// Usage returns the usage of the file system of a directory.
	Usage func(dir string) (Usage, error)
}

// Watch checks directories for room. It is safe for concurrent use.
type Watch struct {
	cfg Config

	mu      sync.Mutex
	state   State
	refused error // of a writer, since the last check
}

// New returns a watch whose State has room until the first Check.
func New(cfg Config) *Watch {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Usage == nil {
		cfg.Usage = usage
	}
	return &Watch{cfg: cfg, state: State{Dir: cfg.Dirs[0], Since: cfg.Now()}}
}

// Note gives the watch a writer's error, which the next Check counts. Errors that are not for want of room are ignored.
func (w *Watch) Note(err error) {
	if !IsFull(err) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused = err
}

// State returns the state that the last Check found.
func (w *Watch) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// Check reads the file systems, and returns the new state and whether Full changed.
func (w *Watch) Check() (State, bool) {
	w.mu.Lock()
	refused, was := w.refused, w.state
	w.refused = nil
	w.mu.Unlock()
	next := w.measure(was.Full, refused)
	changed := next.Full != was.Full
	next.Since = was.Since
	if changed {
		next.Since = w.cfg.Now()
	}
	w.mu.Lock()
	w.state = next
	w.mu.Unlock()
	return next, changed
}

// measure returns the state of the first directory without room, else of the first directory.
func (w *Watch) measure(wasFull bool, refused error) State {
	first := State{Dir: w.cfg.Dirs[0]}
	for i, dir := range w.cfg.Dirs {
		u, err := w.cfg.Usage(dir)
		if err != nil {
			continue // it is gone or cannot be read: the writers there report that
		}
		s := State{Usage: u, Dir: dir}
		if i == 0 {
			first = s
		}
		if s.Detail = short(u, wasFull); s.Detail != "" {
			s.Full = true
			return s
		}
	}
	if refused == nil && wasFull {
		refused = probe(first.Dir)
	}
	if IsFull(refused) {
		first.Full, first.Detail = true, "a write was refused: "+refused.Error()
	}
	return first
}

// short returns what a file system lacks; empty if nothing. One that was full needs twice as much to count as having
// room.
func short(u Usage, wasFull bool) string {
	bytes, files := Mark(u.SizeBytes), int64(leastFiles)
	if wasFull {
		bytes, files = 2*bytes, 2*files
	}
	switch {
	case u.FreeBytes < bytes:
		return fmt.Sprintf("%d KiB of %d KiB are free, %d KiB are needed", u.FreeBytes>>10, u.SizeBytes>>10, bytes>>10)
	case u.Files > 0 && u.FreeFiles < files:
		return fmt.Sprintf("%d of %d inodes are free, %d are needed", u.FreeFiles, u.Files, files)
	default:
		return ""
	}
}

// Mark returns how many bytes must be free on a file system of size bytes.
func Mark(size int64) int64 { return min(max(size/markPart, leastMark), mostMark) }

// probe writes and removes a file.
func probe(dir string) error {
	path := filepath.Join(dir, probeFile)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600) // the agent's own directory
	if err != nil {
		return fmt.Errorf("probe for room: %w", err)
	}
	_, err = f.Write(make([]byte, probeSize))
	if err := errors.Join(err, f.Sync(), f.Close(), os.Remove(path)); err != nil {
		return fmt.Errorf("probe for room: %w", err)
	}
	return nil
}

func usage(dir string) (Usage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Usage{}, fmt.Errorf("ask for room in %s: %w", dir, err)
	}
	block := uint64(st.Bsize) // a block's size is positive
	return Usage{
		SizeBytes: int64(st.Blocks * block), FreeBytes: int64(st.Bavail * block),
		Files: int64(st.Files), FreeFiles: int64(st.Ffree),
	}, nil
}
