package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

var (
	errOpenTimeout = errors.New("no admission in time")
	errSilent      = errors.New("nothing came from the control plane for too long")
	errExpired     = errors.New("the certificate has expired")
	errNotYet      = errors.New("the certificate is not valid yet: the host's clock may be wrong")
	errNoIdentity  = errors.New("no certificate is held")
	errProtocol    = errors.New("the control plane broke the protocol")
	errDrained     = errors.New("replaced")
	errGoodbye     = errors.New("the agent ends")
)

// certificateRefusedError means that the server ended the handshake because of this node's certificate.
type certificateRefusedError struct{ cause error }

func (e *certificateRefusedError) Error() string {
	return "the server refused this node's certificate: " + e.cause.Error()
}
func (e *certificateRefusedError) Unwrap() error { return e.cause }

// edgeError means that a proxy in front of the control plane answered in its place.
type edgeError struct {
	limited bool
	cause   error
}

func (e *edgeError) Error() string {
	return "an edge answered, not the control plane: " + e.cause.Error()
}
func (e *edgeError) Unwrap() error { return e.cause }

// The alerts with which a TLS 1.3 server refuses a client's certificate.
var certificateAlerts = []tls.AlertError{42, 43, 44, 45, 46, 48, 49, 113, 116}

// tooLargeWait, before the growing wait of every retry, keeps both sides from sending the same frame in a loop.
const tooLargeWait = 5 * time.Second

// understand returns the most specific error that follows from grpc's error and from the failures below grpc that w has
// noted.
func understand(err error, w *wire) error {
	if err == nil {
		return nil
	}
	below := w.first()
	var netErr *net.OpError
	if errors.As(below, &netErr) && netErr.Op == "remote error" && netErr.Err != nil {
		for _, alert := range certificateAlerts {
			// crypto/tls does not export the type of the received alert; the texts of equal alerts are equal.
			if netErr.Err.Error() == alert.Error() {
				return &certificateRefusedError{below}
			}
		}
	}
	if below != nil {
		return below
	}
	if st, ok := status.FromError(err); ok && len(st.Details()) == 0 {
		// grpc reports a response that is not grpc only in its message.
		text := st.Message()
		if st.Code() == codes.ResourceExhausted && strings.Contains(text, "received message larger than max") {
			// The grpc library of one side refused a frame before the code above it could send a Denial. Both sides use the same
			// text, so this code cannot find out which side it was.
			return fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", fault.WithAction(commonv1.Action_ACTION_WAIT),
				fault.RetryAfter(tooLargeWait), fault.Cause(err))
		}
		limited := strings.Contains(text, "received from server: 429") || strings.Contains(text, "Too Many Requests")
		if limited || strings.Contains(text, `content-type "text/html`) {
			return &edgeError{limited: limited || strings.Contains(text, "503"), cause: err}
		}
	}
	if errors.Is(err, io.EOF) {
		return err
	}
	return fault.FromGRPC(err)
}

// codeOf returns the diagnostic code of an error.
func codeOf(err error) commonv1.DiagnosticCode {
	var (
		dns       *net.DNSError
		untrusted *tls.CertificateVerificationError
		authority x509.UnknownAuthorityError
		refused   *certificateRefusedError
		edge      *edgeError
		handshake *handshakeError
	)
	switch {
	case errors.Is(err, errExpired), errors.Is(err, errNotYet), errors.Is(err, errNoIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
	case errors.As(err, &edge):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
	case errors.As(err, &refused):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
	case errors.As(err, &untrusted), errors.As(err, &authority), errors.Is(err, pki.ErrIdentity):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED
	case errors.As(err, &dns):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_NAME_RESOLUTION_FAILED
	case errors.Is(err, syscall.ECONNREFUSED):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CONNECTION_REFUSED
	case errors.As(err, &handshake):
		return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
	}
	if f, ok := fault.As(err); ok {
		return codeOfReason(f.Reason)
	}
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_TASK_POLL_FAILED
}

func codeOfReason(reason commonv1.Reason) commonv1.DiagnosticCode {
	switch reason { //nolint:exhaustive // every other refusal of a session is just that
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
