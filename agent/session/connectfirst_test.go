package session_test

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/agent/clock"
	"github.com/gpuaas/mesh/agent/session"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const codeExpired = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED

// ended waits for the end of Run, and checks that the identity is to be recovered after as many connections.
func (h *harness) ended(connections int) {
	h.t.Helper()
	err := <-h.done
	h.cancel()
	h.fakeServer.end()
	id, ok := errors.AsType[*session.IdentityError](err)
	if !ok || id.Action != commonv1.Action_ACTION_RECOVER {
		h.t.Errorf("Run = %v", err)
	}
	if len(h.dials) != connections {
		h.t.Errorf("%d connections, want %d", len(h.dials), connections)
	}
	if last := h.diagnostics[len(h.diagnostics)-1]; last.Code != codeExpired {
		h.t.Errorf("the last diagnostic is %v", last)
	}
}

// TestTheServerJudgesAnExpiredCertificate: the client connects with it, and the refusal ends Run.
func TestTheServerJudgesAnExpiredCertificate(t *testing.T) {
	tests := map[string]struct {
		refuse error                // of a handshake
		script func(v *visit) error // of a stream
	}{
		"by the alert":        {},
		"by another alert":    {refuse: errors.New("no")},
		"by a denial":         {script: denied(commonv1.Reason_REASON_CERTIFICATE_EXPIRED)},
		"by another denial":   {script: denied(commonv1.Reason_REASON_SERIAL_UNKNOWN)},
		"the serial is older": {script: denied(commonv1.Reason_REASON_SERIAL_SUPERSEDED)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.refuse, p.script = tt.refuse, tt.script
				m, offset := p.memory(), time.Duration(0)
				if tt.script != nil {
					offset = 24 * time.Hour // the server still takes it
				} else {
					time.Sleep(p.ttl + time.Second)
				}
				h := start(t, p, m, func(d *session.Deps, _ *session.Config) { d.Clock = clock.New(offset) })
				err := <-h.done
				h.done <- err
				if tt.script == nil {
					h.ended(1)
					return
				}
				h.cancel()
				h.fakeServer.end()
				if _, ok := errors.AsType[*session.IdentityError](err); !ok || p.opened() != 1 {
					t.Errorf("Run = %v after %d opens", err, p.opened())
				}
			})
		})
	}
}

func denied(reason commonv1.Reason) func(v *visit) error {
	return func(v *visit) error { return v.deny(fault.New(reason, "")) }
}

// TestAWrongClockKeepsNoNodeAway: with the host's clock a day ahead or back the session opens at once, and the server's
// time counts from then on.
func TestAWrongClockKeepsNoNodeAway(t *testing.T) {
	for name, offset := range map[string]time.Duration{"ahead": 24 * time.Hour, "back": -24 * time.Hour} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.interval = time.Minute
				h := start(t, p, p.memory(), func(d *session.Deps, _ *session.Config) { d.Clock = clock.New(offset) })
				h.until("admitted", time.Second, h.admitted)
				h.until("renewed", 5*time.Hour, func() bool { return h.client.Generation() == 2 })
				h.stop()
				if n := p.saw("renew"); n != 1 {
					t.Errorf("%d renewals", n)
				}
			})
		})
	}
}

// TestWhereNothingAnswersAnExpiredCertificateIsTriedSlowly: an outage is no judgement. Once the server is there it judges.
func TestWhereNothingAnswersAnExpiredCertificateIsTriedSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		m := p.memory()
		time.Sleep(p.ttl + time.Second)
		away := time.Now().Add(3 * time.Hour)
		h := start(t, p, m, func(d *session.Deps, _ *session.Config) {
			dial := d.Dial
			d.Dial = func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := dial(ctx, address)
				if time.Now().Before(away) {
					if err == nil {
						_ = conn.Close()
					}
					return nil, syscall.ECONNREFUSED
				}
				return conn, err
			}
		})
		time.Sleep(time.Until(away) - time.Second)
		select {
		case err := <-h.done:
			t.Fatalf("Run ended without an answer: %v", err)
		default:
		}
		h.hmu.Lock()
		tried := len(h.dials)
		h.hmu.Unlock()
		if tried < 170 || tried > 370 { // one in 30 to 60 s
			t.Errorf("%d connections in 3 h", tried)
		}
		err := <-h.done
		h.cancel()
		h.fakeServer.end()
		if _, ok := errors.AsType[*session.IdentityError](err); !ok {
			t.Errorf("Run = %v", err)
		}
	})
}

// TestAHandshakeThatIsRefusedForAnotherReasonIsTriedAgain: the issuer may be what the ingress does not trust, and no
// recovery would bring another.
func TestAHandshakeThatIsRefusedForAnotherReasonIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFakeServer(t)
		p.refuse = errors.New("no")
		h := start(t, p, p.memory(), nil)
		time.Sleep(time.Hour)
		select {
		case err := <-h.done:
			t.Fatalf("Run = %v", err)
		default:
		}
		p.mu.Lock()
		p.refuse = nil
		p.mu.Unlock()
		h.until("admitted", time.Minute, h.admitted)
		h.stop()
	})
}
