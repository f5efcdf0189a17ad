package output

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/agent/runtime/filelock"
)

// The output of a workload is kept for two runs: the present and the previous one. A run's file is cut when it grows
// too large, and the end of the part that was cut is kept as its former piece. output.json has which run is in which
// file; it changes together with the files under a lock.

// InfoFile is the name of the file that has the runs in the other files. The recorder writes it.
const InfoFile = "output.json"

const (
	filePresent  = "output.log"   // of the present run
	filePrevious = "previous.log" // of the previous run
	fileLock     = "output.lock"  // locked while the files change, and while they are read
	formerPiece  = ".1"           // of a file that was cut
)

// lockWait bounds how long a change of the files waits for those that read them.
const lockWait = 5 * time.Second

// contents is the content of output.json: which runs are in the output files of a workload.
type contents struct {
	runFile
	Previous *runFile `json:"previous,omitempty"`
}

// runFile is the output of one run.
type runFile struct {
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
func (i contents) moved(dir string) bool {
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

// lockBriefly takes the lock for a change, which waits for readers for a moment only: they are bounded, and a
// workload must start.
func lockBriefly(dir string) (*os.File, error) {
	f, err := filelock.Within(lockWait, filepath.Join(dir, fileLock), unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("lock output: %w", err)
	}
	return f, nil
}

// keep moves the files of the present run to the places of the previous one's, and reports whether there is a file. It
// completes a move that an earlier call began. The piece of the previous run is removed first, so that a file is never
// beside the piece of another run.
func (i contents) keep(dir string) (bool, error) {
	path, previous := filepath.Join(dir, filePresent), filepath.Join(dir, filePrevious)
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
