package process

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// The output of a workload is kept for two runs: the present and the previous one. A run's file is cut when it grows
// too large, and the end of the part that was cut is kept as its former piece. output.json has which run is in which
// file; it changes together with the files under a lock.

const (
	filePrevious   = "previous.log" // of the previous run
	fileOutputInfo = "output.json"  // by the shim: the runs in the files
	fileOutputLock = "output.lock"  // locked while the files change, and while they are read
	formerPiece    = ".1"           // of a file that was cut
)

// outputInfo is the content of output.json: which runs are in the output files of a workload.
type outputInfo struct {
	runOutput
	Previous *runOutput `json:"previous,omitempty"`
}

// runOutput is the output of one run.
type runOutput struct {
	Run       string    `json:"run"`
	StartedAt time.Time `json:"started_at"`
	Cut       int64     `json:"cut"`                // where the file begins in the run's output
	PieceAt   int64     `json:"piece_at"`           // where the former piece begins
	Rotating  *cutting  `json:"rotating,omitempty"` // a rotation under way
	ExitCode  int32     `json:"exit_code"`
	HasExited bool      `json:"has_exited"` // of a previous run: ExitCode is set
	Masked    []string  `json:"masked"`     // the values that are hidden in it
	File      uint64    `json:"file"`       // the inode of its file; zero if it is not known
}

// moved reports whether the file of the present run is in the place of the previous one's: the start of another run
// moved it there, and did not complete. The previous run's file is gone then.
func (i outputInfo) moved(dir string) bool {
	return i.File != 0 && inodeOf(filepath.Join(dir, filePrevious)) == i.File
}

// inodeOf returns the inode of a file, which identifies it after a rename; zero if there is none.
func inodeOf(path string) uint64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Ino
}

// lockOutput takes the lock of a workload's output files.
func lockOutput(ctx context.Context, dir string, how int) (*os.File, error) {
	//nolint:gosec // the agent's own directory
	f, err := os.OpenFile(filepath.Join(dir, fileOutputLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock output: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock output: %w", err), f.Close())
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("lock output: %w", context.Cause(ctx)), f.Close())
		}
	}
}

// lockOutputBriefly takes the lock for a change, which waits for readers for a moment only: they are bounded, and a
// workload must start.
func lockOutputBriefly(dir string) (*os.File, error) {
	//nolint:forbidigo // a shim has no caller: signals end it between its steps
	ctx, cancel := context.WithTimeout(context.Background(), lockWait)
	defer cancel()
	return lockOutput(ctx, dir, unix.LOCK_EX)
}

// openOutput makes the output file of a new run. The output of the present run becomes that of the previous one. A
// failure at any step, as on a full disk, loses no output of the present run: the next call finds its file by the inode
// in output.json and goes on from there.
func (s *shim) openOutput(run string) (*os.File, error) {
	lock, err := lockOutputBriefly(s.dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = lock.Close() }()
	info, err := s.outputInfo()
	if err != nil {
		return nil, err
	}
	kept, err := info.keep(s.dir)
	if err != nil {
		return nil, fmt.Errorf("keep output of the former run: %w", err)
	}
	path := filepath.Join(s.dir, fileOutput)
	//nolint:gosec // the shim's own directory
	out, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	next := outputInfo{runOutput: runOutput{
		Run: run, StartedAt: time.Now(), Masked: secretsOf(s.spec),
		File: inodeOf(path),
	}}
	if kept {
		last := info.runOutput
		if s.state.Run == last.Run && s.state.HasExited {
			last.ExitCode, last.HasExited = s.state.ExitCode, true
		}
		next.Previous = &last
	}
	if err := writeFile(s.dir, fileOutputInfo, next); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return out, nil
}

// outputInfo returns the content of output.json, brought up to date with the present files: it settles a rotation that
// did not complete, and records a file whose inode is not in output.json, since such a file would not be found after a
// rename.
func (s *shim) outputInfo() (outputInfo, error) {
	path := filepath.Join(s.dir, fileOutput)
	var info outputInfo
	found, err := readFile(s.dir, fileOutputInfo, &info)
	if err != nil || !found {
		// The output is that of a shim of an earlier version, or output.json cannot be read: the values that are masked now
		// are masked in it.
		info = outputInfo{runOutput: runOutput{Masked: secretsOf(s.spec)}}
	}
	changed := info.Rotating != nil
	if info.runOutput, err = info.settled(path); err != nil {
		return outputInfo{}, err
	}
	if file := inodeOf(path); file != 0 && info.File != file && !info.moved(s.dir) {
		info.File, changed = file, true
	}
	if changed {
		if err := writeFile(s.dir, fileOutputInfo, info); err != nil {
			return outputInfo{}, err
		}
	}
	_ = removeFile(path + formerPiece + nextPiece) // of a rotation that ended early; the next one overwrites it otherwise
	return info, nil
}

// keep moves the files of the present run to the places of the previous one's, and reports whether there is a file. It
// completes a move that an earlier call began. The piece of the previous run is removed first, so that a file is never
// beside the piece of another run.
func (i outputInfo) keep(dir string) (bool, error) {
	path, previous := filepath.Join(dir, fileOutput), filepath.Join(dir, filePrevious)
	if !i.moved(dir) {
		if err := removeFile(previous + formerPiece); err != nil {
			return false, err
		}
		err := os.Rename(path, previous)
		if errors.Is(err, fs.ErrNotExist) {
			return false, errors.Join(removeFile(previous), removeFile(path+formerPiece))
		}
		if err != nil {
			return false, err
		}
	}
	err := os.Rename(path+formerPiece, previous+formerPiece)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return true, err
}

// removeFile removes a file that may not be there.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
