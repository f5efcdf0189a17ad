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

const (
	codeExpired = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
	codeRefused = commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
)

// givesUp waits for the end of Run, and checks that the identity is to be recovered after one connection.
func (h *harness) givesUp(code commonv1.DiagnosticCode) {
	h.t.Helper()
	err := <-h.done
	h.cancel()
	h.fakeServer.end()
	id, ok := errors.AsType[*session.IdentityError](err)
	if !ok || id.Action != commonv1.Action_ACTION_RECOVER {
		h.t.Errorf("Run = %v", err)
	}
	if len(h.dials) != 1 {
		h.t.Errorf("%d connections", len(h.dials))
	}
	if len(h.diagnostics) != 1 || h.diagnostics[0].Code != code {
		h.t.Errorf("diagnostics %v", h.diagnostics)
	}
}

// TestTheServerDecidesAboutAnExpiredCertificate: the client connects with it, and the refusal ends Run.
func TestTheServerDecidesAboutAnExpiredCertificate(t *testing.T) {
	tests := map[string]struct {
		refuse error           // of a handshake
		deny   commonv1.Reason // of a stream: the server's clock lets the handshake pass
		behind time.Duration   // the host's clock, of a certificate that has expired
		code   commonv1.DiagnosticCode
	}{
		"by the alert":        {code: codeExpired},
		"by the alert alone":  {behind: 2 * time.Hour, code: codeExpired},
		"by another alert":    {refuse: errors.New("no"), code: codeExpired},
		"by a denial":         {deny: commonv1.Reason_REASON_CERTIFICATE_EXPIRED, code: codeExpired},
		"by another denial":   {deny: commonv1.Reason_REASON_SERIAL_UNKNOWN, code: codeRefused},
		"the serial is older": {deny: commonv1.Reason_REASON_SERIAL_SUPERSEDED, code: codeRefused},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newFakeServer(t)
				p.refuse = tt.refuse
				m, offset := p.memory(), -tt.behind
				if tt.deny == 0 {
					time.Sleep(p.ttl + time.Second)
				} else {
					offset = 24 * time.Hour
					p.script = func(v *visit) error { return v.deny(fault.New(tt.deny, "")) }
				}
				h := start(t, p, m, func(d *session.Deps, _ *session.Config) { d.Clock = clock.New(offset) })
				h.givesUp(tt.code)
			})
		})
	}
}

// TestAWrongClockKeepsNoNodeAway checks that with the host's clock a day ahead or back the session opens at once, and
// that the server's time counts from then on.
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

// TestWhereNothingAnswersAnExpiredCertificateIsTriedSlowly checks that an outage does not count as a decision about an
// expired certificate: the agent tries it slowly, and the server decides once it is there.
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
