// Package cause owns the one mapping from what failed to the diagnostic code under which it is recorded, for sessions
// and for enrolment alike.
//
// An error of the agent's own packages carries its code (New, or a method DiagnosticCode); Of knows the errors of the
// network, of TLS and of refusals. It decides nothing about what the agent does next.
package cause

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"os"
	"syscall"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// Attempt is what was attempted.
type Attempt int

// The attempts.
const (
	Session   Attempt = iota // to open a session, or to keep one
	Enrolment                // to enrol
)

// Clock is what is known of the time. The zero value knows nothing.
type Clock struct {
	Wall   time.Time // by the host's clock
	Server time.Time // by the control plane's clock, as far as it is known; zero: it is not
}

// Coded is an error that has its own code.
type Coded interface {
	error
	DiagnosticCode() commonv1.DiagnosticCode
}

// New returns an error with a text and the code under which it is recorded.
func New(code commonv1.DiagnosticCode, text string) error { return &coded{code, text} }

type coded struct {
	code commonv1.DiagnosticCode
	text string
}

func (c *coded) Error() string                           { return c.text }
func (c *coded) DiagnosticCode() commonv1.DiagnosticCode { return c.code }

// is reports whether an error of type E is in the tree of err.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// Of returns the diagnostic code of an error.
func Of(err error, of Attempt, clock Clock) commonv1.DiagnosticCode {
	if own, ok := errors.AsType[Coded](err); ok {
		return byClock(own.DiagnosticCode(), clock)
	}
	if code, ok := below(err, clock); ok {
		return code
	}
	if f, ok := fault.As(err); ok {
		return ofReason(f.Reason, of)
	}
	return failed(of)
}

// below returns the code of an error below the protocols of the mesh.
func below(err error, clock Clock) (commonv1.DiagnosticCode, bool) {
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return ofServerTime(invalid.Cert, clock), true
	}
	switch {
	case is[*tls.CertificateVerificationError](err), is[x509.UnknownAuthorityError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED, true
	case errors.Is(err, pki.ErrIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_NAME_MISMATCH, true
	case is[*net.DNSError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED, true
	case errors.Is(err, syscall.ECONNREFUSED):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED, true
	case TimedOut(err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_TIMED_OUT, true
	}
	return 0, false
}

// TimedOut reports whether no answer came to a connect, a handshake or a request in time.
func TimedOut(err error) bool {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) ||
		errors.Is(err, syscall.ETIMEDOUT) {
		return true
	}
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
}

// Below reports whether an error is one below the protocols of the mesh, which the library of a protocol would hide.
func Below(err error) bool {
	_, ok := below(err, Clock{})
	return ok || is[Coded](err)
}

// ofServerTime returns the code of a server's certificate that is not valid at the time that was taken for the present.
func ofServerTime(cert *x509.Certificate, clock Clock) commonv1.DiagnosticCode {
	switch {
	case cert == nil:
	case !clock.Server.IsZero() && valid(cert, clock.Server):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED
	case clock.Server.IsZero() && clock.Wall.Before(cert.NotBefore):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_NOT_YET_VALID
	}
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
}

func valid(cert *x509.Certificate, at time.Time) bool {
	return !at.Before(cert.NotBefore) && !at.After(cert.NotAfter)
}

// Skewed is how far the host's clock may be off: what certificates allow to a host whose clock is behind.
const Skewed = pki.Backdate

// byClock returns the code of a certificate that is not valid by the host's clock: if the control plane's clock is
// known and differs by more than certificates allow, the clock is the cause.
func byClock(code commonv1.DiagnosticCode, clock Clock) commonv1.DiagnosticCode {
	dated := code == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_NOT_YET_VALID
	if dated && !clock.Server.IsZero() && clock.Wall.Sub(clock.Server).Abs() > Skewed {
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CLOCK_SKEWED
	}
	return code
}

// failed returns the code of an attempt that failed for a reason of no other code.
func failed(of Attempt) commonv1.DiagnosticCode {
	if of == Enrolment {
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_RECOVERY_ENROLLMENT_BLOCKED
	}
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
}

// ofReason returns the code of a refusal.
func ofReason(reason commonv1.Reason, of Attempt) commonv1.DiagnosticCode {
	switch reason { // every other refusal is just that
	case commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, commonv1.Reason_REASON_IDENTITY_HELD,
		commonv1.Reason_REASON_IDENTITY_QUARANTINED, commonv1.Reason_REASON_IDENTITY_RETIRED,
		commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED
	case commonv1.Reason_REASON_CERTIFICATE_EXPIRED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
	case commonv1.Reason_REASON_RATE_LIMITED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_SERVER_DRAINING, commonv1.Reason_REASON_STREAM_MAX_AGE, commonv1.Reason_REASON_OVERLOADED:
		return failed(of)
	default:
		if of == Enrolment {
			return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED
		}
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
	}
}
