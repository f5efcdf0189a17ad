package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"math"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/session/transport"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pki"
)

// failure is a failed open or a lost session.
type failure struct {
	err   error
	cert  *tls.Certificate // with which the session was opened; nil: there is none
	waits *backoff.Backoff
}

// waitsAfter returns the waits that follow an open which failed with err. Refusals have a count of their own: a control
// plane of which a part is still starting after an outage refuses for some seconds, and with the count of the attempts
// that had no answer the first refusal would be followed by the longest wait.
func (c *Client) waitsAfter(err error) *backoff.Backoff {
	if _, answered := fault.As(err); answered {
		return c.denied
	}
	return c.retry
}

// restartWaits has the next failed open be followed by the shortest wait.
func (c *Client) restartWaits() {
	c.retry.Reset()
	c.denied.Reset()
}

// failed decides what follows a failed open or a lost session: the next open after a wait, or the end of Run. The
// diagnostic is on disk before it returns, so before any retry.
func (r *runner) failed(ctx context.Context, f failure) error {
	if ctx.Err() != nil {
		return nil //nolint:nilerr // Run was asked to end
	}
	f.err = r.withExpiry(f)
	err := f.err
	delay, terminal := r.decide(ctx, f)
	if terminal == nil && r.hinted(f) {
		delay = max(delay, r.slow())
	}
	if terminal != nil && r.active != nil {
		// The replacement was refused, but the session itself stands. If it ends too, its own failure decides.
		delay, terminal = r.slow(), nil
	}
	delay = r.inTime(delay)
	d := Diagnostic{Code: r.c.codeOf(err), Detail: detailOf(err), NextRetry: delay}
	recorded := r.c.record(ctx, d)
	if terminal != nil {
		if id, ok := errors.AsType[*IdentityError](terminal); ok {
			r.reject(f.cert)
			id.Rejected = r.rejected
		}
		return terminal
	}
	if r.otherTrust(ctx, d.Code, err) {
		return &TrustError{err}
	}
	r.c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "session not open", append([]slog.Attr{
		slog.String("code", names.Of(d.Code)), slog.String("detail", d.Detail), slog.Duration("next_retry", delay),
		slog.Int("attempt", f.waits.Attempts()),
	}, recorded.Attrs()...)...)
	r.schedule(delay)
	return nil
}

// otherTrust gives the hook whether an open that failed has verified the server, and reports whether Run is to end.
func (r *runner) otherTrust(ctx context.Context, code commonv1.DiagnosticCode, err error) bool {
	hook := r.c.deps.Hooks.Trust
	if hook == nil || r.active != nil {
		return false
	}
	if code == commonv1.DiagnosticCode_DIAGNOSTIC_CODE_SERVER_TLS_UNTRUSTED {
		invalid, ok := errors.AsType[x509.CertificateInvalidError](err)
		// Other trust does not help where a certificate has ended, or the host's clock is wrong.
		return (!ok || invalid.Reason != x509.Expired) && hook(ctx, false)
	}
	if _, typed := fault.As(err); typed {
		return hook(ctx, true)
	}
	return false
}

// decide returns the wait before the next open, or the error that ends Run.
func (r *runner) decide(ctx context.Context, failed failure) (time.Duration, error) {
	err := failed.err
	next := func(retryAfter time.Duration) time.Duration { return failed.waits.NextWithin(retryAfter, r.share()) }
	switch {
	case errors.Is(err, errNoIdentity):
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case is[*expiredError](err):
		return r.expired(ctx, failed)
	case is[*transport.PhaseError](err):
		// Another address, or another replica behind the same one, may answer: try again at once until each was tried.
		r.timeouts++
		if r.timeouts <= r.c.route.Round() {
			return r.soon(), nil
		}
		return next(0), nil
	case transport.TurnedAway(err):
		return failed.waits.NextWithin(0, min(r.c.cfg.TurnedAway, r.share())), nil
	case is[*transport.CertificateRefusedError](err):
		if r.another(ctx, failed.cert, refusalFlips) {
			return r.soon(), nil
		}
		if r.refusedForGood() {
			return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
		}
		return next(0), nil
	}
	if edge, ok := errors.AsType[*transport.EdgeError](err); ok {
		if edge.Limited {
			if edge.RetryAfter > r.c.cfg.SlowRetry {
				return edge.RetryAfter + r.c.jitter(edge.RetryAfter/4), nil // not all at once when it is over
			}
			return max(edge.RetryAfter, r.slow()), nil
		}
		return next(0), nil
	}
	f, ok := fault.As(err)
	if !ok {
		return next(0), nil
	}
	if f.Reason == commonv1.Reason_REASON_SESSION_SUPERSEDED {
		// Back within two seconds, so that a second holder of this identity is found.
		return 100*time.Millisecond + r.c.jitter(1400*time.Millisecond), nil
	}
	if lifted(f.Reason) && f.RetryAfter > 0 {
		// An operator or the control plane will lift this, and the agent is not notified: it tries at the pace that the
		// server asked for, which does not slow down with the tries.
		return f.RetryAfter + r.c.jitter(f.RetryAfter/2), nil
	}
	if f.Reason == commonv1.Reason_REASON_CERTIFICATE_EXPIRED {
		return r.expired(ctx, failed)
	}
	switch fault.ActionOf(err) { // everything unknown waits
	case commonv1.Action_ACTION_STOP:
		return 0, &StopError{Denial: f}
	case commonv1.Action_ACTION_RENEW:
		if r.another(ctx, failed.cert, refusalFlips) {
			return r.soon(), nil
		}
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case commonv1.Action_ACTION_RECOVER:
		return 0, &IdentityError{Action: commonv1.Action_ACTION_RECOVER, Cause: err}
	case commonv1.Action_ACTION_REBUNDLE:
		return 0, &IdentityError{Action: commonv1.Action_ACTION_REBUNDLE, Cause: err}
	default:
		return next(f.RetryAfter), nil
	}
}

// lifted reports whether a refusal stands only until an operator or the control plane lets the node in again.
func lifted(reason commonv1.Reason) bool {
	switch reason { // every other refusal is none
	case commonv1.Reason_REASON_IDENTITY_HELD, commonv1.Reason_REASON_IDENTITY_QUARANTINED,
		commonv1.Reason_REASON_IDENTITY_REVOKED_OR_FENCED:
		return true
	default:
		return false
	}
}

// How often the other certificate may be taken into use until a session is admitted. The end of a certificate allows
// once more: a refusal may have brought back the one that ended now.
const (
	refusalFlips = 1
	expiryFlips  = 2
)

// another reports whether a certificate other than used is in use now: the next one, whose session is not open yet, or
// that of the other slot, which is taken into use at most flips times until a session is admitted.
func (r *runner) another(ctx context.Context, used *tls.Certificate, flips int) bool {
	r.reject(used)
	id := r.c.deps.Identity
	if current := id.Certificate(); used != nil && r.worthTrying(current, used) && !current.Leaf.Equal(used.Leaf) {
		return true
	}
	if r.flips >= flips || !r.worthTrying(id.Other(), used) {
		return false
	}
	if err := id.Flip(); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "other certificate not taken into use", slog.Any("error", err))
		return false
	}
	r.flips++
	return true
}

// inTime shortens a wait that the certificate in use does not outlast. The next try comes while the time that a
// hand-over needs is left, and within that time at ever shorter intervals, even if the peer asked for a longer wait: a
// try too many costs a refusal, an expired certificate costs the session.
func (r *runner) inTime(delay time.Duration) time.Duration {
	leaf := r.lifeline()
	if leaf == nil {
		return delay
	}
	left, lead := leaf.NotAfter.Sub(r.c.deps.Clock.Now()), pki.Lead(pki.Life(leaf))
	if left <= 0 {
		return delay
	}
	most := left - lead
	if most <= lead/2 {
		most = max(left/2, leastRetry)
	}
	if delay <= most {
		return delay
	}
	return most - r.c.jitter(most/4)
}

// leastRetry is the shortest bound of a wait near the end of a certificate.
const leastRetry = 500 * time.Millisecond

// share returns the part of the certificate's life that one wait may take: a sixth, so that retries of short lives are
// as many as those of long ones.
func (r *runner) share() time.Duration {
	if leaf := r.lifeline(); leaf != nil {
		return max(pki.Life(leaf)/6, leastRetry)
	}
	return math.MaxInt64
}

// lifeline returns the certificate with whose end the node loses access: that of the admitted session, else the one of
// the identity that expires last. Nil: there is none.
func (r *runner) lifeline() *x509.Certificate {
	if r.active != nil {
		return r.active.cert.Leaf
	}
	var leaf *x509.Certificate
	for _, cert := range []*tls.Certificate{r.c.deps.Identity.Certificate(), r.c.deps.Identity.Other()} {
		if cert != nil && cert.Leaf != nil && (leaf == nil || cert.Leaf.NotAfter.After(leaf.NotAfter)) {
			leaf = cert.Leaf
		}
	}
	return leaf
}

// soon returns the wait before another certificate, or another address, is tried.
func (r *runner) soon() time.Duration { return r.c.jitter(500 * time.Millisecond) }

// slow returns the wait after an error that only an operator or the edge can clear.
func (r *runner) slow() time.Duration {
	return r.c.cfg.SlowRetry/2 + r.c.jitter(r.c.cfg.SlowRetry/2)
}
