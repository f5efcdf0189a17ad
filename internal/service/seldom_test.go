package service_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/internal/service"
)

// TestSeldomAsksAgainAtOnceAfterAFailure checks that a check which succeeds is made once in its time, and one that
// fails each time.
func TestSeldomAsksAgainAtOnceAfterAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, answer := 0, error(nil)
		check := service.Seldom(10*time.Second, func(context.Context) error {
			asked++
			return answer
		})
		minute := func() int {
			asked = 0
			for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(2 * time.Second) { // simulated
				if err := check(t.Context()); !errors.Is(err, answer) {
					t.Fatalf("answered %v, want %v", err, answer)
				}
			}
			return asked
		}
		if n := minute(); n != 6 {
			t.Errorf("asked %d times a minute", n)
		}
		time.Sleep(10 * time.Second) // simulated
		answer = errors.New("down")
		if n := minute(); n != 30 {
			t.Errorf("asked %d times a minute while it fails", n)
		}
	})
}
