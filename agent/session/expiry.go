package session

import (
	"context"
	"crypto/tls"
	"time"

	"github.com/gpuaas/mesh/agent/identity"
	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// expiredError means that the server refused a certificate because it has expired.
type expiredError struct{ cause error }

func (e *expiredError) Error() string {
	return "the server refused an expired certificate: " + e.cause.Error()
}
func (e *expiredError) Unwrap() error { return e.cause }

// DiagnosticCode returns the code under which the error is recorded.
func (*expiredError) DiagnosticCode() commonv1.DiagnosticCode {
	return commonv1.DiagnosticCode_DIAGNOSTIC_CODE_CERTIFICATE_EXPIRED
}

// withExpiry returns the error of a failure, as an expiredError if the server refused the certificate in the handshake
// because it has expired. Servers that tell no reason are believed to mean that if the certificate has expired by this
// host's clock too.
func (r *runner) withExpiry(f failure) error {
	if !is[*transport.CertificateRefusedError](f.err) || f.cert == nil {
		return f.err
	}
	if transport.RefusedAsExpired(f.err) || transport.RefusedWithoutReason(f.err) && r.pastEnd(f.cert) {
		return &expiredError{f.err}
	}
	return f.err
}

// expired decides what follows from the server's judgement that a certificate has expired: the other certificate, if it
// may still be good, else the end of Run.
func (r *runner) expired(ctx context.Context, f failure) (time.Duration, error) {
	if r.another(ctx, f.cert, expiryFlips) {
		return r.soon(), nil
	}
	return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: f.err}
}

// hinted reports whether an open failed without a judgement of the control plane, with a certificate that has expired
// by this host's clock. The clock may be wrong, so the open is tried again, but slowly.
func (r *runner) hinted(f failure) bool {
	_, typed := fault.As(f.err)
	return !typed && !is[*expiredError](f.err) && f.cert != nil && r.active == nil && r.pastEnd(f.cert)
}

// pastEnd reports whether a certificate has expired by the best estimate of the time.
func (r *runner) pastEnd(cert *tls.Certificate) bool {
	return cert.Leaf != nil && !r.c.deps.Clock.Now().Before(cert.Leaf.NotAfter)
}

// worthTrying reports whether a session may open with cert where one with used was refused: it is valid by the best
// estimate of the time, or it ends later than used, if that estimate is wrong.
func (r *runner) worthTrying(cert, used *tls.Certificate) bool {
	if cert == nil || cert.Leaf == nil {
		return false
	}
	return identity.Usable(cert, r.c.deps.Clock.Now()) || used != nil && cert.Leaf.NotAfter.After(used.Leaf.NotAfter)
}
