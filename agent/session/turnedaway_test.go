package session_test

import (
	"context"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
)

// resetConn is a connection whose other side closes it without having read all.
type resetConn struct{ net.Conn }

func (c resetConn) Read([]byte) (int, error) {
	return 0, &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
}

// TestATurnedAwayAgentComesBackSoon checks that an agent whose connections are closed before TLS waits for longer each
// time, and at most for TurnedAway, whichever way they are closed.
func TestATurnedAwayAgentComesBackSoon(t *testing.T) {
	for name, reset := range map[string]bool{"closed": false, "reset": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				var mu sync.Mutex
				var dials []time.Time
				h := start(t, p, p.memory(), func(d *session.Deps, c *session.Config) {
					c.Draw = func(n int64) int64 { return n - 1 } // the longest wait
					d.Dial = func(context.Context, string) (net.Conn, error) {
						mu.Lock()
						defer mu.Unlock()
						dials = append(dials, time.Now())
						client, server := net.Pipe()
						go func() {
							_, _ = server.Read(make([]byte, 4096))
							_ = server.Close()
						}()
						if reset {
							return resetConn{client}, nil
						}
						return client, nil
					}
				})
				time.Sleep(time.Minute)
				h.stop()
				want := []int{1, 2, 4, 8, 10, 10, 10, 10}
				if len(dials) != len(want)+1 {
					t.Fatalf("%d dials: %v", len(dials), h.diagnostics)
				}
				for i, seconds := range want {
					if wait := dials[i+1].Sub(dials[i]).Round(time.Millisecond); wait.Seconds() != float64(seconds) {
						t.Errorf("dial %d after %v, want %d s", i+1, wait, seconds)
					}
				}
			})
		})
	}
}
