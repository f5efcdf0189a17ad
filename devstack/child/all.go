package child

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"
)

// ErrEnding is returned when a child is started after EndAll: this process ends its children and starts no others.
var ErrEnding = errors.New("this process is ending everything that it started")

// registry is the set of the children of a process that have not been reaped.
type registry struct {
	mu     sync.Mutex
	live   map[*Process]struct{}
	ending bool
}

// children are those of this process. A forced stop must reach all of them, from whichever package they were started.
var children = &registry{live: map[*Process]struct{}{}}

// add registers a child before it is started. It fails once endAll has been called.
func (r *registry) add(p *Process) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ending {
		return ErrEnding
	}
	r.live[p] = struct{}{}
	return nil
}

func (r *registry) remove(p *Process) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.live, p)
}

func (r *registry) endAll(ctx context.Context) error {
	r.mu.Lock()
	r.ending = true
	live := slices.Collect(maps.Keys(r.live))
	r.mu.Unlock()
	var errs []error
	for _, p := range live {
		select {
		case <-p.begun:
		case <-ctx.Done():
			return fmt.Errorf("end children: %w", context.Cause(ctx))
		}
		errs = append(errs, p.Signal(syscall.SIGKILL))
	}
	for _, p := range live {
		select {
		case <-p.done:
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("process %d does not end: %w", p.pid, context.Cause(ctx)))...)
		}
	}
	return errors.Join(errs...)
}

// EndAll kills every child that this process has started, waits for their ends, and makes every later Start fail with
// ErrEnding. It is for a forced stop, after which the process exits.
func EndAll(ctx context.Context) error { return children.endAll(ctx) }
