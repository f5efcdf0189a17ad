package transport

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// CertificateRefusedError means that the server ended the handshake because of this node's certificate, after the
// client had verified the server.
type CertificateRefusedError struct{ cause error }

// Error returns the cause as text.
func (e *CertificateRefusedError) Error() string {
	return "the server refused this node's certificate: " + e.cause.Error()
}

// Unwrap returns the cause.
func (e *CertificateRefusedError) Unwrap() error { return e.cause }

// DiagnosticCode returns the code under which the error is recorded.
func (*CertificateRefusedError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SESSION_REFUSED
}

// RefusedAsExpired reports whether the server ended the handshake with the alert for expired certificates.
func RefusedAsExpired(err error) bool {
	const certificateExpired = 45
	return refusedWith(err, certificateExpired)
}

// RefusedWithoutReason reports whether the server ended the handshake with an alert that does not say what is wrong
// with the certificate.
func RefusedWithoutReason(err error) bool {
	const badCertificate, certificateUnknown = 42, 46
	return refusedWith(err, badCertificate, certificateUnknown)
}

func refusedWith(err error, alerts ...tls.AlertError) bool {
	refused, ok := errors.AsType[*CertificateRefusedError](err)
	if !ok {
		return false
	}
	received, ok := errors.AsType[*net.OpError](refused.cause)
	return ok && received.Err != nil && slices.ContainsFunc(alerts, func(alert tls.AlertError) bool {
		return received.Err.Error() == alert.Error()
	})
}

// EdgeError means that a proxy in front of the control plane answered in its place.
type EdgeError struct {
	Limited    bool
	RetryAfter time.Duration // that the proxy asked for; zero: it did not
	cause      error
}

// Error returns the cause as text.
func (e *EdgeError) Error() string {
	return "an edge answered, not the control plane: " + e.cause.Error()
}

// Unwrap returns the cause.
func (e *EdgeError) Unwrap() error { return e.cause }

// DiagnosticCode returns the code under which the error is recorded.
func (*EdgeError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_EDGE_RATE_LIMITED
}

// certificateAlerts are the alerts with which a TLS 1.3 server refuses a client's certificate.
var certificateAlerts = []tls.AlertError{42, 43, 44, 45, 46, 48, 49, 113, 116}

// tooLargeWait, before the growing wait of every retry, keeps both sides from sending the same frame in a loop.
const tooLargeWait = 5 * time.Second

// Understand returns the most specific error that follows from grpc's error and from the failures below grpc that w
// has noted.
func Understand(err error, w *Wire) error {
	if err == nil {
		return nil
	}
	below := w.first()
	var netErr *net.OpError
	// An alert within the client's handshake comes from a server that has not proven its name.
	_, early := errors.AsType[*HandshakeError](below)
	if !early && errors.As(below, &netErr) && netErr.Op == "remote error" && netErr.Err != nil {
		for _, alert := range certificateAlerts {
			// crypto/tls does not export the type of the received alert; the texts of equal alerts are equal.
			if netErr.Err.Error() == alert.Error() {
				return &CertificateRefusedError{below}
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
			// The grpc library of one side refused a frame before the code above it could send a Denial. Both sides use the
			// same text, so this code cannot find out which side it was.
			return fault.New(commonv1.Reason_REASON_FRAME_TOO_LARGE, "", fault.WithAction(commonv1.Action_ACTION_WAIT),
				fault.RetryAfter(tooLargeWait), fault.Cause(err))
		}
		limited := strings.Contains(text, "received from server: 429") || strings.Contains(text, "Too Many Requests")
		if limited || strings.Contains(text, `content-type "text/html`) {
			return &EdgeError{
				Limited: limited || strings.Contains(text, "503"), RetryAfter: w.retryAfter(), cause: err,
			}
		}
	}
	if errors.Is(err, io.EOF) {
		return err
	}
	return fault.FromGRPC(err)
}
