package dispatch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/task"
)

var errBug = errors.New("a bug")

// groups is a queue whose transactions wait for the test.
type groups struct {
	queue

	mu      sync.Mutex
	begun   [][]string
	release chan error // an answer for each transaction
}

func newGroups() *groups {
	g := &groups{release: make(chan error)}
	g.commit = func(_ context.Context, group []*queued) error {
		keys := make([]string, len(group))
		for i, one := range group {
			keys[i] = one.task.Row.IdemKey
		}
		g.mu.Lock()
		g.begun = append(g.begun, keys)
		g.mu.Unlock()
		return <-g.release
	}
	return g
}

// put queues a task beside the test, and waits until its caller waits.
func (g *groups) put(ctx context.Context, key string) <-chan error {
	ended := make(chan error, 1)
	one := &queued{task: task.Made{Row: task.Row{IdemKey: key}}, lead: make(chan []*queued, 1), done: make(chan struct{})}
	go func() {
		defer func() {
			if err, ok := recover().(error); ok {
				ended <- err
			}
		}()
		err := g.add(ctx, one)
		if err == nil {
			err = one.err
		}
		ended <- err
	}()
	synctest.Wait()
	return ended
}

func (g *groups) wants(t *testing.T, want ...[]string) {
	t.Helper()
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.EqualFunc(g.begun, want, slices.Equal[[]string]) {
		t.Errorf("transactions of %v, not %v", g.begun, want)
	}
}

func TestTasksThatComeTogetherShareACommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroups()
		var all []<-chan error
		for _, key := range []string{"a", "b", "c", "d", "e"} {
			all = append(all, g.put(t.Context(), key))
		}
		g.wants(t, []string{"a"}, []string{"b"})
		g.release <- nil
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d", "e"})
		g.release <- nil
		g.release <- nil
		for i, ended := range all {
			if err := <-ended; err != nil {
				t.Errorf("task %d: %v", i, err)
			}
		}
		if g.lanes != 0 {
			t.Errorf("%d lanes are taken", g.lanes)
		}
		last := g.put(t.Context(), "f")
		g.release <- nil
		if err := <-last; err != nil {
			t.Error(err)
		}
	})
}

// TestATaskThatCannotBeQueuedHurtsNoOther: a group that fails is tried task by task, and each caller gets the result of
// its own.
func TestATaskThatCannotBeQueuedHurtsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroups()
		refused := errors.New("refused")
		a, b := g.put(t.Context(), "a"), g.put(t.Context(), "b")
		c, d := g.put(t.Context(), "c"), g.put(t.Context(), "d")
		g.release <- nil
		g.release <- nil
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d"})
		g.release <- refused
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d"}, []string{"c"})
		g.release <- refused
		g.release <- nil
		if err := <-c; !errors.Is(err, refused) {
			t.Errorf("c: %v", err)
		}
		if err := errors.Join(<-a, <-b, <-d); err != nil {
			t.Error(err)
		}
		lost := errors.Join(pg.ErrCommitUnknown)
		e, f := g.put(t.Context(), "e"), g.put(t.Context(), "f")
		h, i := g.put(t.Context(), "h"), g.put(t.Context(), "i")
		g.release <- nil
		g.release <- nil
		synctest.Wait()
		g.release <- lost // of both at once: what may be there is not queued again
		if err := errors.Join(<-e, <-f); err != nil {
			t.Error(err)
		}
		if first, second := <-h, <-i; !errors.Is(first, lost) || !errors.Is(second, lost) {
			t.Errorf("after a lost commit: %v, %v", first, second)
		}
	})
}

// TestACommitThatPanicsFailsItsGroup: the callers of a group get an error for a panic, which may have come after the
// commit, and the queue goes on.
func TestACommitThatPanicsFailsItsGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroups()
		commit := g.commit
		g.commit = func(ctx context.Context, group []*queued) error {
			err := commit(ctx, group)
			if errors.Is(err, errBug) {
				panic(err)
			}
			return err
		}
		a, b := g.put(t.Context(), "a"), g.put(t.Context(), "b")
		within, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c, d, e := g.put(within, "c"), g.put(within, "d"), g.put(within, "e")
		g.release <- nil
		g.release <- nil
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d", "e"})
		g.release <- errBug
		if err := errors.Join(<-a, <-b); err != nil {
			t.Error(err)
		}
		if err := <-c; !errors.Is(err, errBug) { // its caller ran the commit, and panicked
			t.Errorf("c: %v", err)
		}
		for i, ended := range []<-chan error{d, e} {
			if err := <-ended; !errors.Is(err, errPanicked) || !errors.Is(err, pg.ErrCommitUnknown) {
				t.Errorf("task %d after c: %v", i+1, err)
			}
		}
		f, h := g.put(t.Context(), "f"), g.put(t.Context(), "h")
		g.release <- nil
		g.release <- nil
		if err := errors.Join(<-f, <-h); err != nil || g.lanes != 0 {
			t.Errorf("afterwards: %v, %d lanes are taken", err, g.lanes)
		}
	})
}

// TestACallerThatGoesLeavesTheQueue: a task that waits is removed, the outcome of one under way is unknown to its
// caller, and a caller that is to commit for others does.
func TestACallerThatGoesLeavesTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGroups()
		gone := errors.New("gone")
		under, leave := context.WithCancelCause(t.Context())
		a, b := g.put(t.Context(), "a"), g.put(t.Context(), "b")
		c, d, e := g.put(t.Context(), "c"), g.put(under, "d"), g.put(t.Context(), "e")
		waits, cancel := context.WithCancelCause(t.Context())
		g.release <- nil
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d", "e"})
		f, h := g.put(waits, "f"), g.put(t.Context(), "h")
		leave(gone)
		cancel(gone)
		if err := <-d; !errors.Is(err, pg.ErrCommitUnknown) || !errors.Is(err, gone) {
			t.Errorf("under way: %v", err)
		}
		if err := <-f; !errors.Is(err, gone) || errors.Is(err, pg.ErrCommitUnknown) {
			t.Errorf("waiting: %v", err)
		}
		g.release <- nil
		g.wants(t, []string{"a"}, []string{"b"}, []string{"c", "d", "e"}, []string{"h"})
		g.release <- nil
		g.release <- nil
		if err := errors.Join(<-a, <-b, <-c, <-e, <-h); err != nil {
			t.Error(err)
		}
	})
}
