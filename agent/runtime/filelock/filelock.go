// Package filelock locks files between processes of this host, for as long as a process has the file open.
//
// A lock excludes only those that take it by this package or by flock(2). The package knows no file: its callers decide
// who locks what, and how long it may be waited for.
package filelock

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/app"
)

// retry is the time between two tries to take a lock that another process has.
const retry = 5 * time.Millisecond

// Lock opens the file at path, made if there is none, and takes its lock: how is unix.LOCK_SH or unix.LOCK_EX. Closing
// the file releases the lock. Once ctx has ended the lock is tried once more at most; the error is unix.EWOULDBLOCK or
// unix.EINTR then.
func Lock(ctx context.Context, path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600) // the agent's own directories
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || !app.Sleep(ctx, retry) {
			return nil, errors.Join(err, f.Close())
		}
	}
}

// Within is Lock for a caller that waits at most so long, and has no context.
func Within(wait time.Duration, path string, how int) (*os.File, error) {
	//nolint:forbidigo // bounded by wait
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	return Lock(ctx, path, how)
}
