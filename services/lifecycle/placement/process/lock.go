package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	lockWait  = 10 * time.Second
	lockFirst = 2 * time.Millisecond
	lockLast  = 50 * time.Millisecond
)

// fileLock is held by one caller of one replica at a time. Whoever stops inside of it, a replica that is suspended for one, stops nobody else for longer
// than they care to wait.
type fileLock struct {
	path string
	wait time.Duration // of a caller without a deadline
	turn chan struct{} // of this process, first come first served; only whoever has it asks for the file's lock
}

func newFileLock(path string) *fileLock {
	return &fileLock{path: path, wait: lockWait, turn: make(chan struct{}, 1)}
}

// acquire takes the lock, or answers fault unavailable when ctx ends or its time is over. A lock that is free is taken even if ctx has ended: what a
// caller does on its way out needs it too.
func (l *fileLock) acquire(ctx context.Context) (func() error, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.wait)
		defer cancel()
	}
	select {
	case l.turn <- struct{}{}:
	default:
		select {
		case l.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, l.busy(ctx, os.Getpid())
		}
	}
	file, err := l.flock(ctx)
	if err != nil {
		<-l.turn
		return nil, err
	}
	return func() error {
		defer func() { <-l.turn }()
		if err := file.Close(); err != nil {
			return fmt.Errorf("release launch ledger: %w", err)
		}
		return nil
	}, nil
}

// flock asks again and again: an flock that waits cannot be called off.
func (l *fileLock) flock(ctx context.Context) (*os.File, error) {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open launch ledger's lock: %w", err)
	}
	for pause := lockFirst; ; pause = min(2*pause, lockLast) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// For whoever waits in vain; who holds the lock is decided by the lock alone.
			if err := errors.Join(file.Truncate(0), writeHolder(file)); err != nil {
				return nil, errors.Join(fmt.Errorf("sign launch ledger's lock: %w", err), file.Close())
			}
			return file, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock launch ledger: %w", err), file.Close())
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			text, _ := os.ReadFile(l.path) // no name is better than no refusal
			holder, _ := strconv.Atoi(strings.TrimSpace(string(text)))
			return nil, errors.Join(l.busy(ctx, holder), file.Close())
		}
	}
}

func writeHolder(file *os.File) error {
	_, err := file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

func (l *fileLock) busy(ctx context.Context, holder int) error {
	who := "another process"
	if holder > 0 {
		who = "process " + strconv.Itoa(holder)
	}
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the launch ledger of this host is held by "+who,
		fault.Remedy("ask again; if "+who+" is stopped, continue it or end it: the ledger is free the moment that it is gone"),
		fault.Cause(fmt.Errorf("wait for %s: %w", l.path, context.Cause(ctx))))
}
