package session_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// countedConn counts what is written to a connection.
type countedConn struct {
	net.Conn
	writes *atomic.Int64
}

func (c countedConn) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// TestFramesAreTakenWithoutAWrite sends offers to a session at rest, after which the agent writes nothing to the
// connection: it does not measure the bandwidth with pings of HTTP/2, and enlarges no window for so few bytes.
func TestFramesAreTakenWithoutAWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		var writes atomic.Int64
		h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
			dial := d.Dial
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := dial(ctx, address)
				if err != nil {
					return nil, err
				}
				return countedConn{Conn: conn, writes: &writes}, nil
			}
		})
		h.until("admitted", time.Second, h.admitted)
		synctest.Wait()
		before := writes.Load()
		for range 10 {
			if err := p.session(0).send(&nodev1.ConnectResponse{
				Frame: &nodev1.ConnectResponse_TaskOffer{TaskOffer: &nodev1.TaskOffer{Envelope: make([]byte, 512)}},
			}); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if n := writes.Load() - before; n != 0 {
			t.Errorf("ten offers were followed by %d writes of the agent", n)
		}
		h.stop()
		if h.offers != 10 {
			t.Errorf("%d offers were taken", h.offers)
		}
	})
}
