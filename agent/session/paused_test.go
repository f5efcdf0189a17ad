package session_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
)

// gate stops a replica: nothing is read from its connections and nothing is written to them while it is shut, and
// connections are still taken.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil: open
}

func (g *gate) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = make(chan struct{})
}

func (g *gate) goOn() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.shut)
	g.shut = nil
}

// gated is a connection of such a replica.
type gated struct {
	net.Conn
	gate   *gate
	closed chan struct{}
	once   sync.Once
}

func (c *gated) wait() {
	c.gate.mu.Lock()
	shut := c.gate.shut
	c.gate.mu.Unlock()
	if shut == nil {
		return
	}
	select {
	case <-shut:
	case <-c.closed:
	}
}

func (c *gated) Read(p []byte) (int, error) {
	c.wait()
	return c.Conn.Read(p)
}

func (c *gated) Write(p []byte) (int, error) {
	c.wait()
	return c.Conn.Write(p)
}

func (c *gated) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// replica is a pipe whose other end can be stopped.
type replica struct {
	*pipe
	gate *gate
}

func (r replica) Accept() (net.Conn, error) {
	conn, err := r.pipe.Accept()
	if err != nil {
		return nil, err
	}
	return &gated{Conn: conn, gate: r.gate, closed: make(chan struct{})}, nil
}

// replicas serves the plane at n more listeners. gates stop the replicas of all planes that share them.
func (p *fakeServer) replicas(gates []*gate) []replica {
	var out []replica
	for _, g := range gates {
		r := replica{newPipe(), g}
		out = append(out, r)
		server := p.server
		go func() { _ = server.Serve(r) }()
	}
	return out
}

// absence measures how long an agent is without a session.
type absence struct {
	mu      sync.Mutex
	lost    time.Time
	longest time.Duration
}

func (a *absence) hooks(h *session.Hooks) {
	admitted := h.Admitted
	h.Lost = func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.lost = time.Now()
	}
	h.Admitted = func(ctx context.Context, generation int64) {
		admitted(ctx, generation)
		a.mu.Lock()
		defer a.mu.Unlock()
		if !a.lost.IsZero() {
			a.longest = max(a.longest, time.Since(a.lost))
			a.lost = time.Time{}
		}
	}
}

// TestAPausedReplicaLosesItsSessions: nine agents are at a replica that is stopped. They have one address, behind
// which connections are spread over three replicas, whether these answer or not.
func TestAPausedReplicaLosesItsSessions(t *testing.T) {
	const agents, within = 9, 10 * time.Second
	synctest.Test(t, func(t *testing.T) {
		gates := []*gate{{}, {}, {}}
		var spread atomic.Bool
		var fleet []*harness
		away := make([]absence, agents)
		for i := range agents {
			p := newFakeServer(t)
			behind := p.replicas(gates)
			// The connections of each agent go to the replicas in order, by a count of its own: with one count for all
			// agents, the dials of others would decide how often an agent meets the stopped replica.
			var next atomic.Int64
			next.Store(int64(i))
			fleet = append(fleet, start(t, p, p.memory(), func(d *session.Deps, cfg *session.Config) {
				seeded(uint64(i))(d, cfg)
				d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
					to := 0
					if spread.Load() {
						to = int(next.Add(1)) % len(behind)
					}
					return behind[to].dial(ctx, address)
				}
				away[i].hooks(&d.Hooks)
			}))
		}
		for _, h := range fleet {
			h.until("admitted", 5*time.Second, h.admitted)
		}
		time.Sleep(time.Minute)
		spread.Store(true)
		gates[0].stop()
		stopped := time.Now()
		time.Sleep(3 * time.Minute)
		for i, h := range fleet {
			a := &away[i]
			a.mu.Lock()
			if h.client.Generation() < 2 || !a.lost.IsZero() {
				t.Errorf("agent %d: not back %v after its replica was stopped", i, time.Since(stopped))
			}
			if a.longest > within {
				t.Errorf("agent %d: back %v after it noticed, want %v", i, a.longest, within)
			}
			a.mu.Unlock()
		}
		gates[0].goOn()
		for _, h := range fleet {
			h.stop()
		}
	})
}
