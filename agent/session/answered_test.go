package session_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestTheFirstRefusalAfterAnOutageIsFollowedByAShortWait checks that an agent which nothing has answered for long, and
// which is refused then because the control plane is not whole yet, comes back soon; that each refusal is followed by a
// longer wait, whatever happens between two; and that an admission starts the waits anew.
func TestTheFirstRefusalAfterAnOutageIsFollowedByAShortWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		const closed, denied, admitted = "closed", "denied", "admitted"
		script := []string{
			closed, closed, closed, closed, closed, closed, denied, denied, closed, denied, admitted, denied, admitted,
		}
		var attempts []time.Time
		step := func() string { return script[min(len(attempts), len(script))-1] }
		p.script = func(v *visit) error {
			switch {
			case step() == denied:
				return v.deny(fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""))
			case len(attempts) >= len(script):
				return v.normal()
			}
			generation, err := v.issue() // a session that ends as soon as it is admitted
			if err != nil {
				return v.deny(err)
			}
			return errors.Join(v.welcome(generation), v.ready(generation), v.admit(generation))
		}
		h := start(t, p, p.memory(), func(d *session.Deps, c *session.Config) {
			c.Draw = func(n int64) int64 { return n - 1 } // the longest wait
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				attempts = append(attempts, time.Now()) // one open is in flight at a time
				if step() != closed {
					return p.pipe.dial(ctx, address)
				}
				client, server := net.Pipe()
				go func() {
					_, _ = server.Read(make([]byte, 4096))
					_ = server.Close()
				}()
				return client, nil
			}
		})
		time.Sleep(3 * time.Minute)
		h.stop()
		var waits []int
		for i := range len(attempts) - 1 {
			waits = append(waits, int(attempts[i+1].Sub(attempts[i]).Round(time.Second).Seconds()))
		}
		// A refusal as unavailable asks for a second, which is added. Closed connections are followed by 10 s at most.
		want := []int{1, 2, 4, 8, 10, 10, 1 + 1, 1 + 2, 10, 1 + 4, 1, 1 + 1}
		if !slices.Equal(waits, want) {
			t.Errorf("waits of %v s, want %v", waits, want)
		}
	})
}
