package session_test

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/agenttest"
	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/session"
	"github.com/gpuaas/mesh/agent/session/memory"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// recovers waits for the end of Run, checks that it asks for a recovery, and returns how long it took and the error.
func (h *harness) recovers(began time.Time) (time.Duration, *session.IdentityError) {
	h.t.Helper()
	err := <-h.done
	took := time.Since(began)
	h.cancel()
	h.fakeServer.end()
	id, ok := errors.AsType[*session.IdentityError](err)
	if !ok || id.Action != commonv1.Action_ACTION_RECOVER {
		h.t.Fatalf("Run = %v", err)
	}
	return took, id
}

// running fails the test if Run ends within a time.
func (h *harness) running(within time.Duration) {
	h.t.Helper()
	select {
	case err := <-h.done:
		h.t.Fatalf("Run = %v", err)
	case <-time.After(within):
	}
}

// TestARefusedCertificateIsRecovered checks that a refused certificate ends Run for a recovery after a bounded number
// of handshakes, and not before the control plane had the time to find out that its ingress is wrong, whether the
// refusal names the issuer or no reason.
func TestARefusedCertificateIsRecovered(t *testing.T) {
	for name, stale := range map[string]bool{"an unknown issuer": true, "no reason": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.refuse = errors.New("no")
				m := p.memory()
				if stale {
					p.refuse = nil
					m = p.stale()
				}
				began := time.Now()
				h := start(t, p, m, nil)
				took, id := h.recovers(began)
				if took < 30*time.Second || took > 2*time.Minute+30*time.Second {
					t.Errorf("after %v", took)
				}
				if len(h.dials) < 3 || len(h.dials) > 40 {
					t.Errorf("%d handshakes", len(h.dials))
				}
				if want := pki.SerialString(m.Certificate().Leaf.SerialNumber); !slices.Equal(id.Rejected, []string{want}) {
					t.Errorf("rejected %v, want %s", id.Rejected, want)
				}
				for _, d := range h.diagnostics {
					if d.Code != codeRefused {
						t.Errorf("recorded %v", d)
					}
				}
			})
		})
	}
}

// TestAFleetThatIsRefusedAtOnceDoesNotEnrolAtOnce: the ends of Run are spread over the minute.
func TestAFleetThatIsRefusedAtOnceDoesNotEnrolAtOnce(t *testing.T) {
	var ends [6]int // of ten seconds each
	for range 24 {
		synctest.Test(t, func(t *testing.T) {
			p := newFakeServer(t)
			p.refuse = errors.New("no")
			began := time.Now()
			took, _ := start(t, p, p.memory(), func(_ *session.Deps, c *session.Config) {
				c.Backoff.Cap = 5 * time.Second // below the ten seconds of an interval
			}).recovers(began)
			ends[min(max(int((took-30*time.Second)/(10*time.Second)), 0), len(ends)-1)]++
		})
	}
	for _, n := range ends {
		if n > 14 {
			t.Errorf("ends of Run by tens of seconds: %v", ends)
		}
	}
}

// TestARefusalThatIsRepairedNeedsNoRecovery checks that refusals from before an admission do not count after it, and
// that a denial does not count as a refusal of the certificate.
func TestARefusalThatIsRepairedNeedsNoRecovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		refuse := func(err error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.refuse = err
		}
		refuse(errors.New("no"))
		var last net.Conn
		h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
			dial := d.Dial
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := dial(ctx, address)
				last = conn
				return conn, err
			}
		})
		for range 5 {
			h.running(25 * time.Second)
			refuse(nil)
			h.until("admitted", time.Minute, h.admitted)
			refuse(errors.New("no"))
			_ = last.Close() // no open is in flight
		}
		refuse(nil)
		p.mu.Lock()
		p.script = func(v *visit) error { return v.deny(fault.New(commonv1.Reason_REASON_UNAVAILABLE, "")) }
		p.mu.Unlock()
		h.running(time.Hour)
		h.stop()
	})
}

// TestAnAlertOfAnUnverifiedServerIsNoRefusal: anything on the way can end a handshake with an alert in the clear.
func TestAnAlertOfAnUnverifiedServerIsNoRefusal(t *testing.T) {
	for name, alert := range map[string]byte{"bad certificate": 42, "certificate expired": 45, "unknown CA": 48} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
					d.Dial = func(context.Context, string) (net.Conn, error) {
						ours, theirs := net.Pipe()
						go func() {
							defer func() { _ = theirs.Close() }()
							header := make([]byte, 5)
							if _, err := io.ReadFull(theirs, header); err != nil {
								return
							}
							_, _ = io.ReadFull(theirs, make([]byte, int(header[3])<<8|int(header[4])))
							_, _ = theirs.Write([]byte{21, 3, 3, 0, 2, 2, alert})
						}()
						return ours, nil
					}
				})
				h.running(3 * time.Hour)
				h.stop()
			})
		})
	}
}

// TestAnAlertThatIsLostDelaysAndNoMore checks that lost alerts delay the recovery and do not prevent it: here every
// other refusal looks like a broken connection.
func TestAnAlertThatIsLostDelaysAndNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.refuse = errors.New("no")
		began, dials := time.Now(), 0
		h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
			dial := d.Dial
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := dial(ctx, address)
				if dials++; dials%2 == 0 && err == nil {
					_ = conn.Close()
				}
				return conn, err
			}
		})
		if took, _ := h.recovers(began); took > 4*time.Minute {
			t.Errorf("after %v", took)
		}
	})
}

// TestRefusalsLongApartAreNone checks that a refusal from before an outage of hours does not count with one after it,
// which would end Run at once.
func TestRefusalsLongApartAreNone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.refuse = errors.New("no")
		began := time.Now()
		back := began.Add(2 * time.Hour)
		h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) {
			dial := d.Dial
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				if now := time.Now(); now.After(began.Add(20*time.Second)) && now.Before(back) {
					return nil, errors.New("no route")
				}
				return dial(ctx, address)
			}
		})
		if took, _ := h.recovers(began); took < 2*time.Hour+30*time.Second {
			t.Errorf("Run ended %v after the outage", took-2*time.Hour)
		}
	})
}

// TestAReplacementThatIsRefusedEndsNoSession: the certificate that a renewal brought is refused, and the session on the
// one before it stands.
func TestAReplacementThatIsRefusedEndsNoSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		h := start(t, p, p.memory(), nil)
		h.until("admitted", time.Minute, h.admitted)
		p.mu.Lock()
		p.refuse = errors.New("no")
		p.mu.Unlock()
		h.running(4*time.Hour + 20*time.Minute) // the renewal comes at half the life of 8 h
		if h.client.Generation() != 1 {
			t.Errorf("generation %d", h.client.Generation())
		}
		h.stop()
	})
}

// TestAnIssuerThatIsNotTrustedIsNoExpiry checks that the refusal of an issuer is not taken for an expiry, though by the
// host's clock the certificate has ended: the server names the cause.
func TestAnIssuerThatIsNotTrustedIsNoExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		began := time.Now()
		h := start(t, p, p.stale(), func(d *session.Deps, _ *session.Config) { d.Clock = clock.New(24 * time.Hour) })
		if took, _ := h.recovers(began); took < 30*time.Second {
			t.Errorf("after %v", took)
		}
	})
}

// stale returns an identity whose certificate the server trusted before.
func (p *fakeServer) stale() *memory.Identity {
	p.t.Helper()
	trusted := p.nodes
	another, err := agenttest.NewAuthority("another", time.Now())
	if err != nil {
		p.t.Fatal(err)
	}
	p.nodes = another
	m := p.memory()
	p.nodes = trusted
	return m
}
