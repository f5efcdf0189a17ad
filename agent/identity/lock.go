package identity

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/gpuaas/mesh/agent/room"
)

// LockedError means that another process uses the directory. Two agents on one directory would look like a copied
// identity to the control plane.
type LockedError struct {
	Dir string
	PID int // of the holder; zero if it could not be read
}

// Error returns a text with the holder's pid.
func (e *LockedError) Error() string {
	if e.PID == 0 {
		return fmt.Sprintf("state directory %s is in use by another agent", e.Dir)
	}
	return fmt.Sprintf("state directory %s is in use by the agent with pid %d", e.Dir, e.PID)
}

// lockDir takes the lock, which the kernel releases when the process ends, and writes the pid for the next agent to
// read.
func lockDir(path, dir string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, fileMode)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		holder, readErr := io.ReadAll(io.LimitReader(f, 32))
		pid := 0
		if readErr == nil {
			pid, _ = strconv.Atoi(strings.TrimSpace(string(holder))) // an unreadable pid is only left out of the message
		}
		return nil, errors.Join(&LockedError{Dir: dir, PID: pid}, f.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock state directory: %w", err), f.Close())
	}
	// Only the lock excludes others. The pid is used in messages alone, so it may stay unwritten on a full disk.
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil && !room.IsFull(err) {
		return nil, errors.Join(fmt.Errorf("write pid: %w", err), f.Close())
	}
	return f, nil
}
