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

// fileLock is a lock that one caller of one replica holds at a time. If the holder stops, for example because its
// replica is suspended, other callers wait only as long as their contexts allow.
type fileLock struct {
	path  string
	wait  time.Duration // of a caller without a deadline
	token chan struct{} // of this process, first come first served; only its holder tries to lock the file
}

func newFileLock(path string) *fileLock {
	return &fileLock{path: path, wait: lockWait, token: make(chan struct{}, 1)}
}

// acquire takes the lock, or returns fault unavailable when ctx ends, or after wait if ctx has no deadline. It takes a
// free lock even if ctx has ended, because callers need it for their cleanup too.
func (l *fileLock) acquire(ctx context.Context) (func() error, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, l.wait)
		defer cancel()
	}
	select {
	case l.token <- struct{}{}:
	default:
		select {
		case l.token <- struct{}{}:
		case <-ctx.Done():
			return nil, l.busy(ctx, os.Getpid())
		}
	}
	file, err := l.flock(ctx)
	if err != nil {
		<-l.token
		return nil, err
	}
	return func() error {
		defer func() { <-l.token }()
		if err := file.Close(); err != nil {
			return fmt.Errorf("release launch log: %w", err)
		}
		return nil
	}, nil
}

// flock tries to lock the file repeatedly, because a blocking flock cannot be cancelled.
func (l *fileLock) flock(ctx context.Context) (*os.File, error) {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open launch log's lock: %w", err)
	}
	for pause := lockFirst; ; pause = min(2*pause, lockLast) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// The pid is for the error of callers that wait in vain; the lock alone decides who holds it.
			if err := errors.Join(file.Truncate(0), writeHolder(file)); err != nil {
				return nil, errors.Join(fmt.Errorf("sign launch log's lock: %w", err), file.Close())
			}
			return file, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock launch log: %w", err), file.Close())
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			text, _ := os.ReadFile(l.path) // without the pid the refusal names no process
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
	return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "the launch log of this host is held by "+who,
		fault.Remedy("ask again; if "+who+
			" is stopped, continue it or end it: the log is free the moment that it is gone"),
		fault.Cause(fmt.Errorf("wait for %s: %w", l.path, context.Cause(ctx))))
}
