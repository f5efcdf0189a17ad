package session_test

import (
	"context"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/session"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// places are addresses of one name; the first of them is one at which an opening stops at some phase.
type places struct {
	mu    sync.Mutex
	bad   func(ctx context.Context) (net.Conn, error)
	dials []string
}

const (
	badPlace  = "192.0.2.1"
	goodPlace = "192.0.2.2"
)

// use lets a client find both addresses, the bad one first.
func (p *places) use(good func(context.Context, string) (net.Conn, error)) func(*session.Deps, *session.Config) {
	return func(d *session.Deps, cfg *session.Config) {
		cfg.Draw = func(n int64) int64 { return n - 1 } // keeps the order of addresses, and draws the longest wait
		d.Endpoint = func() (string, error) { return "nodeapi.test:443", nil }
		d.Lookup = func(context.Context, string) ([]string, error) { return []string{badPlace, goodPlace}, nil }
		d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			host, port, err := net.SplitHostPort(address)
			if err != nil || port != "443" {
				return nil, err
			}
			p.mu.Lock()
			p.dials = append(p.dials, host)
			p.mu.Unlock()
			if host == badPlace {
				return p.bad(ctx)
			}
			return good(ctx, address)
		}
	}
}

func (p *places) asked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.dials)
}

// TestEachPhaseHasItsTime: an opening that stops at a phase is given up after the time of that phase, and the next
// one takes the other address at once.
func TestEachPhaseHasItsTime(t *testing.T) {
	tests := map[string]struct {
		within time.Duration
		detail string
		bad    func(p *fakeServer) func(context.Context) (net.Conn, error) // the way to the bad place
		script func(v *visit) error                                        // of the first stream
	}{
		"connection": {within: 3 * time.Second, bad: func(*fakeServer) func(context.Context) (net.Conn, error) {
			return func(ctx context.Context) (net.Conn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}
		}},
		"TLS handshake": {
			within: 8 * time.Second, detail: "no TLS handshake from 192.0.2.1:443 within 8s",
			bad: func(*fakeServer) func(context.Context) (net.Conn, error) {
				backlog := newPipe()
				go func() { _, _ = backlog.Accept() }() // and no byte is read
				return func(ctx context.Context) (net.Conn, error) { return backlog.dial(ctx, "") }
			},
		},
		"Welcome": {within: 5 * time.Second, detail: "no Welcome from 192.0.2.1:443 within 5s", script: func(v *visit) error {
			<-v.stream.Context().Done()
			return nil
		}},
		"Admitted": {within: 5 * time.Second, detail: "no Admitted from 192.0.2.1:443 within 5s", script: func(
			v *visit,
		) error {
			generation, err := v.issue()
			if err != nil {
				return err
			}
			if err := v.welcome(generation); err != nil {
				return err
			}
			<-v.stream.Context().Done()
			return nil
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.script = func(v *visit) error {
					if tt.script != nil && v.n == 0 {
						return tt.script(v)
					}
					return v.normal()
				}
				where := &places{bad: func(ctx context.Context) (net.Conn, error) { return p.pipe.dial(ctx, "") }}
				if tt.bad != nil {
					where.bad = tt.bad(p)
				}
				begin := time.Now()
				h := start(t, p, p.memory(), where.use(p.pipe.dial))
				h.until("admitted at the other address", 2*tt.within, h.admitted)
				if took := time.Since(begin); took < tt.within || took > tt.within+time.Second {
					t.Errorf("admitted after %v", took)
				}
				if got := where.asked(); !slices.Equal(got, []string{badPlace, goodPlace}) {
					t.Errorf("dialed %q", got)
				}
				h.stop()
				if tt.detail == "" { // the next address was taken within the same open
					if len(h.diagnostics) != 0 {
						t.Errorf("diagnostics %v", h.diagnostics)
					}
					return
				}
				if len(h.diagnostics) != 1 || !strings.Contains(h.diagnostics[0].Detail, tt.detail) {
					t.Errorf("diagnostics %v", h.diagnostics)
				}
			})
		})
	}
}

// TestAServerThatWorksOnAnOpeningIsWaitedFor checks that an agent waits for a busy server that sends a frame about the
// opening every two seconds.
func TestAServerThatWorksOnAnOpeningIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		busy := func(v *visit) error {
			for range 4 {
				time.Sleep(2 * time.Second)
				if err := v.send(
					&nodev1.ConnectResponse{Frame: &nodev1.ConnectResponse_HeartbeatAck{HeartbeatAck: &nodev1.HeartbeatAck{}}},
				); err != nil {
					return err
				}
			}
			return nil
		}
		p.script = func(v *visit) error {
			generation, err := v.issue()
			if err != nil {
				return err
			}
			if err := busy(v); err != nil {
				return err
			}
			if err := v.welcome(generation); err != nil {
				return err
			}
			if err := v.ready(generation); err != nil {
				return err
			}
			if err := busy(v); err != nil {
				return err
			}
			if err := v.admit(generation); err != nil {
				return err
			}
			return v.run()
		}
		h := start(t, p, p.memory(), seeded(1))
		h.until("admitted", 19*time.Second, h.admitted)
		h.stop()
		if p.opened() != 1 || len(h.diagnostics) != 0 {
			t.Errorf("%d opens, diagnostics %v", p.opened(), h.diagnostics)
		}
	})
}

// TestSilenceEverywhereIsNoHaste checks that after a round of opens that timed out the waits become longer, and so does
// the time of a phase, so that a server that is slow and not paused admits the agent.
func TestSilenceEverywhereIsNoHaste(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		const slow = 15 * time.Second
		p.script = func(v *visit) error {
			time.Sleep(slow)
			if v.stream.Context().Err() != nil {
				return nil //nolint:nilerr // the agent left: the server has nothing to say
			}
			return v.normal()
		}
		h := start(t, p, p.memory(), func(_ *session.Deps, cfg *session.Config) {
			cfg.Draw = func(n int64) int64 { return n - 1 }
		})
		h.until("admitted by a slow server", 3*time.Minute, h.admitted)
		h.stop()
		var waits []time.Duration
		for _, d := range h.diagnostics {
			waits = append(waits, (d.NextRetry + 1).Round(time.Millisecond))
		}
		const half = 500 * time.Millisecond
		// the waits after three timeouts of 5 s and three of 10 s; the next open has 20 s for the phase
		want := []time.Duration{half, half, half, 2 * half, 4 * half, 8 * half}
		if !slices.Equal(waits, want) {
			t.Errorf("waits %v, want %v", waits, want)
		}
	})
}

// TestAddressesAreSpread: agents that find many addresses do not all take the first.
func TestAddressesAreSpread(t *testing.T) {
	first := map[string]int{}
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			p := newFakeServer(t)
			where := &places{bad: func(ctx context.Context) (net.Conn, error) { return p.pipe.dial(ctx, "") }}
			h := start(t, p, p.memory(), func(d *session.Deps, cfg *session.Config) {
				where.use(p.pipe.dial)(d, cfg)
				seeded(seed)(d, cfg)
			})
			h.until("admitted", time.Second, h.admitted)
			h.stop()
			first[where.asked()[0]]++
		})
	}
	if first[badPlace] < 10 || first[goodPlace] < 10 {
		t.Errorf("first addresses %v", first)
	}
}
