package service

import (
	"context"
	"sync"
	"time"
)

// Seldom returns a check that is not made again for the time after once it has succeeded. A check that fails is made at
// each call. No lock is taken during a check: callers that come meanwhile check as well, each for as long as its own
// context lives.
func Seldom(after time.Duration, check func(context.Context) error) func(context.Context) error {
	return seldom(func() time.Duration { return after }, check)
}

func seldom(after func() time.Duration, check func(context.Context) error) func(context.Context) error {
	var mu sync.Mutex
	var last time.Time // the beginning of the last check that succeeded
	return func(ctx context.Context) error {
		began := time.Now()
		mu.Lock()
		fresh := !last.IsZero() && began.Sub(last) < after()
		mu.Unlock()
		if fresh {
			return nil
		}
		if err := check(ctx); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if last.Before(began) {
			last = began
		}
		return nil
	}
}
