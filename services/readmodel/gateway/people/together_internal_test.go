package people

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// TestReadsThatWaitShareAStatement has calls wait while two statements are under way: one statement reads their rows
// after they called. A caller that leaves does not affect the others, even if it was to run the statement.
func TestReadsThatWaitShareAStatement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var statements atomic.Int32
		goOn := make(chan struct{})
		g := &together[string]{read: func(_ context.Context, ids []string) (map[string]string, error) {
			n := statements.Add(1)
			<-goOn
			found := map[string]string{}
			for _, id := range ids {
				if id != "none" {
					found[id] = fmt.Sprintf("%s by %d", id, n)
				}
			}
			return found, nil
		}}
		var calls sync.WaitGroup
		call := func(ctx context.Context, id, want string) {
			calls.Go(func() {
				got, ok, err := g.get(ctx, id)
				if got != want || ok != (want != "") || (err != nil) != (ctx.Err() != nil) {
					t.Errorf("%s: %q, %t, %v; want %q", id, got, ok, err, want)
				}
			})
			synctest.Wait()
		}
		call(t.Context(), "first", "first by 1")
		call(t.Context(), "second", "second by 2")
		leaves, leave := context.WithCancel(t.Context())
		call(leaves, "leaver", "")
		leave()
		synctest.Wait()
		for range 8 {
			call(t.Context(), "waits", "waits by 3")
		}
		call(t.Context(), "none", "")
		close(goOn)
		calls.Wait()
		if n := statements.Load(); n != 3 {
			t.Errorf("%d statements, want 3", n)
		}
		if g.running != 0 || g.next != nil {
			t.Errorf("%d statements are under way at the end, %v waits", g.running, g.next)
		}
	})
}

// TestReadsThatWaitAllEnd calls from many goroutines, some of which leave.
func TestReadsThatWaitAllEnd(t *testing.T) {
	failure := errors.New("no database")
	g := &together[string]{read: func(_ context.Context, ids []string) (map[string]string, error) {
		found := map[string]string{}
		for _, id := range ids {
			if id == "7" {
				return nil, failure
			}
			found[id] = id
		}
		return found, nil
	}}
	var calls sync.WaitGroup
	for i := range 64 {
		calls.Go(func() {
			for n := range 200 {
				ctx, cancel := context.WithCancel(t.Context())
				if n%5 == 0 {
					cancel()
				}
				id := fmt.Sprint((i + n) % 32)
				got, _, err := g.get(ctx, id)
				if err == nil && got != id || err != nil && !errors.Is(err, failure) && ctx.Err() == nil {
					t.Errorf("%s: %q, %v", id, got, err)
				}
				cancel()
			}
		})
	}
	calls.Wait()
	if g.running != 0 {
		t.Errorf("%d statements are under way at the end", g.running)
	}
	if got, ok, err := g.get(t.Context(), "3"); got != "3" || !ok || err != nil {
		t.Errorf("afterwards: %q, %t, %v", got, ok, err)
	}
}

// TestAReadThatPanicsFailsAllItsCallers has one call join the batch of another whose statement panics.
func TestAReadThatPanicsFailsAllItsCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		g := &together[string]{read: func(_ context.Context, ids []string) (map[string]string, error) {
			<-goOn
			if slices.Contains(ids, "waits") {
				panic("a bug")
			}
			return map[string]string{}, nil
		}}
		var calls sync.WaitGroup
		var panicked, failed atomic.Int32
		call := func(id string) {
			calls.Go(func() {
				defer func() {
					if recover() != nil {
						panicked.Add(1)
					}
				}()
				_, ok, err := g.get(t.Context(), id)
				if err != nil {
					failed.Add(1)
				} else if id == "waits" {
					t.Errorf("%s: %t without an error", id, ok)
				}
			})
			synctest.Wait()
		}
		call("first")
		call("second")
		call("waits")
		call("waits")
		close(goOn)
		calls.Wait()
		if panicked.Load() != 1 || failed.Load() != 1 || g.running != 0 {
			t.Errorf("%d callers panicked, %d failed, %d statements are under way at the end",
				panicked.Load(), failed.Load(), g.running)
		}
	})
}
