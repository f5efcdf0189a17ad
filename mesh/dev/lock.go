package dev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// ErrInUse is returned if another mesh runs on the directory.
var ErrInUse = errors.New("data directory is in use")

// lockDir keeps a second mesh out for as long as the returned file is open. The kernel releases the lock when this
// process dies.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "dev.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, readErr := os.ReadFile(f.Name())
		pid := strings.TrimSpace(string(holder))
		if readErr != nil || pid == "" {
			pid = "unknown"
		}
		return nil, errors.Join(fmt.Errorf("%w: a mesh (pid %s) runs on %s", ErrInUse, pid, dir), f.Close())
	}
	if err := f.Truncate(0); err != nil {
		return nil, errors.Join(fmt.Errorf("lock data directory: %w", err), f.Close())
	}
	if _, err := fmt.Fprintf(f, "%d\n", os.Getpid()); err != nil {
		return nil, errors.Join(fmt.Errorf("lock data directory: %w", err), f.Close())
	}
	return f, nil
}
