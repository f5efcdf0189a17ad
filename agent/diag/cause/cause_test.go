package cause_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent/diag/cause"
	"github.com/gpuaas/mesh/agent/identity/enrol"
	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// Each cause has one code, of sessions and of enrolment alike; only what none of them names differs.
func TestCodes(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	cert := &x509.Certificate{NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
	dated := fmt.Errorf("handshake: %w", &tls.CertificateVerificationError{
		Err: x509.CertificateInvalidError{Cert: cert, Reason: x509.Expired},
	})
	notYet := cause.New(commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_NOT_YET_VALID, "not yet")
	day := 24 * time.Hour
	tests := []struct {
		name               string
		err                error
		clock              cause.Clock
		session, enrolment string // empty: as session
	}{
		{
			name: "untrusted", err: &tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}},
			session: "server_tls_untrusted",
		},
		{name: "another identity", err: fmt.Errorf("x: %w", pki.ErrIdentity), session: "server_name_mismatch"},
		{name: "another domain", err: &pki.TrustDomainError{Got: "x"}, session: "server_name_mismatch"},
		{name: "dns", err: &net.OpError{Op: "dial", Err: &net.DNSError{IsTimeout: true}}, session: "name_resolution_failed"},
		{
			name: "refused", err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)},
			session: "connection_refused",
		},
		{name: "deadline", err: fmt.Errorf("dial: %w", context.DeadlineExceeded), session: "connection_timed_out"},
		{name: "timeout", err: &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, session: "connection_timed_out"},
		{name: "kernel", err: &net.OpError{Op: "dial", Err: syscall.ETIMEDOUT}, session: "connection_timed_out"},
		{name: "phase", err: &transport.PhaseError{}, session: "connection_timed_out"},
		{name: "edge", err: fmt.Errorf("x: %w", &enrol.EdgeError{Status: 429}), session: "edge_rate_limited"},
		{name: "edge of streams", err: &transport.EdgeError{}, session: "edge_rate_limited"},
		{name: "no token", err: enrol.ErrNoToken, session: "recovery_enrollment_blocked"},
		{name: "not pinned", err: errors.Join(enrol.ErrNotPinned, os.ErrNotExist), session: "server_tls_untrusted"},
		{
			name: "server's certificate by a clock that is ahead", err: dated,
			clock: cause.Clock{Wall: now.Add(day), Server: now}, session: "clock_skewed",
		},
		{
			name: "server's certificate, of which the server says the same", err: dated,
			clock: cause.Clock{Wall: now.Add(day), Server: now.Add(day)}, session: "server_tls_untrusted",
		},
		{
			name: "server's certificate of tomorrow", err: dated, clock: cause.Clock{Wall: now.Add(-day)},
			session: "certificate_not_yet_valid",
		},
		{
			name: "server's certificate of yesterday", err: dated, clock: cause.Clock{Wall: now.Add(day)},
			session: "server_tls_untrusted",
		},
		{name: "ours of tomorrow", err: notYet, clock: cause.Clock{Wall: now}, session: "certificate_not_yet_valid"},
		{
			name: "ours of tomorrow by a wrong clock", err: notYet, clock: cause.Clock{Wall: now.Add(-day), Server: now},
			session: "clock_skewed",
		},
		{name: "429 of ours", err: fault.New(commonv1.Reason_REASON_RATE_LIMITED, ""), session: "edge_rate_limited"},
		{name: "held", err: fault.New(commonv1.Reason_REASON_IDENTITY_HELD, ""), session: "identity_revoked"},
		{name: "expired", err: fault.New(commonv1.Reason_REASON_CERTIFICATE_EXPIRED, ""), session: "certificate_expired"},
		{
			name: "denied", err: fault.New(commonv1.Reason_REASON_SERIAL_UNKNOWN, ""), session: "session_refused",
			enrolment: "enrollment_refused",
		},
		{
			name: "unavailable", err: fault.New(commonv1.Reason_REASON_UNAVAILABLE, ""), session: "task_poll_failed",
			enrolment: "recovery_enrollment_blocked",
		},
		{
			name: "anything", err: errors.New("x"), session: "task_poll_failed", enrolment: "recovery_enrollment_blocked",
		},
	}
	for _, tt := range tests {
		if tt.enrolment == "" {
			tt.enrolment = tt.session
		}
		if got := names.Of(cause.Of(tt.err, cause.Session, tt.clock)); got != tt.session {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.session)
		}
		if got := names.Of(cause.Of(tt.err, cause.Enrolment, tt.clock)); got != tt.enrolment {
			t.Errorf("%s at enrolment: %s, want %s", tt.name, got, tt.enrolment)
		}
	}
}
