package events

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestConsumersOfAProcessReadTheEndOfTheLogOnce checks that the idle consumers of a process together make one read in
// ten seconds, whenever they began.
func TestConsumersOfAProcessReadTheEndOfTheLogOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Signal
		defer s.listen()()
		ctx, cancel := context.WithCancel(t.Context())
		var reads atomic.Int64
		read := func(context.Context) (int64, error) {
			reads.Add(1)
			time.Sleep(10 * time.Millisecond)
			return 7, nil
		}
		for range 5 {
			go func() {
				for sleep(ctx, s.untilTogether(time.Second), nil) {
					if pos, err := s.horizon(ctx, read); err != nil || pos != 7 {
						t.Errorf("the end of the log is %d: %v", pos, err)
					}
				}
			}()
			time.Sleep(1300 * time.Millisecond)
		}
		before := reads.Load()
		time.Sleep(time.Minute)
		cancel()
		synctest.Wait()
		if n := reads.Load() - before; n != 6 {
			t.Errorf("five consumers made %d reads in a minute, want 6", n)
		}
	})
}

// TestAReadBeforeANotificationServesNoneAfterIt: no caller after a notification gets the result of a read that had
// ended or was under way before it, or of one that failed.
func TestAReadBeforeANotificationServesNoneAfterIt(t *testing.T) {
	var s Signal
	end := s.listen()
	ctx := t.Context()
	answer := func(pos int64, err error) func(context.Context) (int64, error) {
		return func(context.Context) (int64, error) { return pos, err }
	}
	want := func(pos int64, read func(context.Context) (int64, error)) {
		t.Helper()
		if got, err := s.horizon(ctx, read); err != nil || got != pos {
			t.Errorf("the end of the log is %d, want %d: %v", got, pos, err)
		}
	}
	want(1, answer(1, nil))
	want(1, answer(2, nil))
	s.Notify()
	want(2, func(context.Context) (int64, error) {
		s.Notify()
		return 2, nil
	})
	failed := errors.New("the database is away")
	if _, err := s.horizon(ctx, answer(0, failed)); !errors.Is(err, failed) {
		t.Errorf("a read that failed answered %v", err)
	}
	want(3, answer(3, nil))
	end()
	want(4, answer(4, nil)) // the notifications are over
	want(5, answer(5, nil))
}
