package skew_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/services/nodeapi/session/skew"
)

// TestASlowAnswerDoesNotMoveTheClock: ten seconds may pass between sending and receiving, and the server's time may be
// of any moment between the two.
func TestASlowAnswerDoesNotMoveTheClock(t *testing.T) {
	const ahead = time.Hour
	now := time.Now()
	for name, c := range map[string]struct {
		sent, received time.Duration // from now
		read           time.Duration // when the server read its clock, from now
		step           time.Duration // of the host's clock since the reading before
		most           time.Duration // the greatest error of the clock afterwards
	}{
		"read at the begin of a slow answer": {received: 10 * time.Second, most: 2 * time.Millisecond},
		"read at the end of a slow answer": {
			received: 10 * time.Second, read: 10 * time.Second, most: 2 * time.Millisecond,
		},
		"a quick answer":                  {received: time.Millisecond, read: time.Millisecond, most: time.Millisecond},
		"the host's clock was set, quick": {received: time.Millisecond, step: time.Minute, most: time.Millisecond},
		"the host's clock was set, slow": {
			received: 10 * time.Second, step: time.Minute, read: 5 * time.Second, most: 10 * time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var clock skew.Clock
			clock.Set(now, now.Add(2*time.Millisecond), now.Add(ahead+time.Millisecond))
			host := now.Add(c.step)
			clock.Set(host.Add(c.sent), host.Add(c.received), now.Add(ahead+c.read))
			if wrong := (clock.Offset() - (ahead - c.step)).Abs(); wrong > c.most {
				t.Errorf("the clock is %s wrong, want %s at most", wrong, c.most)
			}
		})
	}
}
