package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"strings"
	"syscall"

	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

var (
	errOpenTimeout = errors.New("no admission in time")
	errStreamEnded = errors.New("the stream ended")
	errSilent      = errors.New("nothing came from the control plane for too long")
	errExpired     = errors.New("the certificate has expired")
	errNotYet      = errors.New("the certificate is not valid yet: the host's clock may be wrong")
	errNoIdentity  = errors.New("no certificate is held")
	errProtocol    = errors.New("the control plane broke the protocol")
	errDrained     = errors.New("replaced")
	errGoodbye     = errors.New("the agent ends")
)

// is reports whether an error of type E is in the tree of err.
func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// codeOf returns the diagnostic code of an error.
func codeOf(err error) commonv1.DiagnosticCode {
	switch {
	case errors.Is(err, errExpired), errors.Is(err, errNotYet), errors.Is(err, errNoIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
	case is[*transport.EdgeError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	case is[*transport.CertificateRefusedError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
	case is[*tls.CertificateVerificationError](err), is[x509.UnknownAuthorityError](err), errors.Is(err, pki.ErrIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	case is[*net.DNSError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED
	case errors.Is(err, syscall.ECONNREFUSED):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	case is[*transport.HandshakeError](err):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
	}
	if f, ok := fault.As(err); ok {
		return codeOfReason(f.Reason)
	}
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
}

func codeOfReason(reason commonv1.Reason) commonv1.DiagnosticCode {
	switch reason { // every other refusal of a session is just that
	case commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED, commonv1.Reason_REASON_IDENTITY_HELD,
		commonv1.Reason_REASON_IDENTITY_QUARANTINED,
		commonv1.Reason_REASON_IDENTITY_RETIRED, commonv1.Reason_REASON_CLONED_IDENTITY_DETECTED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_IDENTITY_REVOKED
	case commonv1.Reason_REASON_CERTIFICATE_EXPIRED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
	case commonv1.Reason_REASON_RATE_LIMITED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	case commonv1.Reason_REASON_UNAVAILABLE, commonv1.Reason_REASON_DEADLINE_EXCEEDED, commonv1.Reason_REASON_INTERNAL,
		commonv1.Reason_REASON_SERVER_DRAINING, commonv1.Reason_REASON_STREAM_MAX_AGE, commonv1.Reason_REASON_OVERLOADED:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
	default:
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
	}
}

// detailOf returns one line for the record: reason and text of a refusal, else the error. Errors of this package have
// no secrets in them.
func detailOf(err error) string {
	if errors.Is(err, context.Canceled) {
		return "canceled"
	}
	text := err.Error()
	if f, ok := fault.As(err); ok {
		text = names.Of(f.Reason) + ": " + f.Public
		if cause := errors.Unwrap(f); cause != nil {
			text += ": " + cause.Error()
		}
	}
	const most = 512
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	return text
}
