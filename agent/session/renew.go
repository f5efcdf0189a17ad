package session

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/agent/backoff"
	"github.com/gpuaas/mesh/agent/identity"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/recoverykey"
)

// renewal is the state of the renewal of the certificate.
type renewal struct {
	c       *Client
	timer   *time.Timer
	retry   *backoff.Backoff
	request string // id of the request that waits for its reply
	flip    bool   // the next certificate is stored and is to be used when no open is in flight
}

func newRenewal(c *Client) renewal {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return renewal{c: c, timer: timer, retry: backoff.New(c.cfg.RenewRetry).WithDraw(c.cfg.Draw)}
}

// arm sets the time of the request: about the half of the certificate's life before its end, or after a wait if that
// has passed.
func (n *renewal) arm(cert *tls.Certificate, wait time.Duration) {
	life := pki.Life(cert.Leaf)
	at := cert.Leaf.NotAfter.Add(-life/2 - life/20 + n.c.jitter(life/10))
	now := n.c.deps.Clock.Now()
	until := at.Sub(now)
	if until <= 0 {
		until = n.c.jitter(min(30*time.Second, max(cert.Leaf.NotAfter.Sub(now), 0)/10))
	}
	n.request = ""
	n.timer.Reset(max(until, wait))
}

func (n *renewal) pause() {
	n.request = ""
	n.timer.Stop()
}

// renew requests the next certificate over the admitted session, with a key that is on disk, the same one until a
// certificate for it is stored.
func (r *runner) renew(ctx context.Context) {
	if r.active == nil {
		return
	}
	id := r.c.deps.Identity
	if current := id.Certificate(); current == nil || !current.Leaf.Equal(r.active.cert.Leaf) {
		r.renewal.timer.Reset(r.answerWithin()) // the next certificate is stored, and its session is opening
		return
	}
	if r.renewal.request != "" {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "renewal not answered", slog.String("request_id", r.renewal.request))
		r.renewal.request = ""
		r.renewal.timer.Reset(r.renewIn(0))
		return
	}
	if err := r.requestRenewal(); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "renewal not requested", slog.Any("error", err))
		r.renewal.timer.Reset(r.renewIn(0))
		return
	}
	r.renewal.timer.Reset(r.answerWithin())
}

// answerWithin returns how long to wait for the reply to a renewal: less for a certificate of a short life.
func (r *runner) answerWithin() time.Duration {
	return min(r.c.cfg.RenewTimeout, r.share())
}

// renewIn counts a renewal that failed and returns the wait before the next, which comes before the certificate ends.
func (r *runner) renewIn(retryAfter time.Duration) time.Duration {
	return r.inTime(r.renewal.retry.NextWithin(retryAfter, r.share()))
}

func (r *runner) requestRenewal() error {
	key, err := r.c.deps.Identity.RenewalKey()
	if err != nil {
		return err
	}
	if err := failpoint.Hit("agent.session.renew.before_send"); err != nil {
		return err
	}
	node, _ := r.c.deps.Identity.Node()
	csr, err := pki.NewCSR(key, pki.NodeID(node.TrustDomain, node.NodeID))
	if err != nil {
		return err
	}
	public, err := r.recoveryKey()
	if err != nil {
		return err
	}
	request := ids.New()
	frame := &nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_RenewRequest{
		RenewRequest: &nodev1.RenewRequest{RequestId: request, Csr: csr, RecoveryPublicKey: public},
	}}
	if err := r.c.out.Request(frame); err != nil {
		return err
	}
	r.renewal.request = request
	return nil
}

// recoveryKey returns the public half of the key to which the next recovery token is to be bound; nil: none is wanted.
func (r *runner) recoveryKey() ([]byte, error) {
	key, err := r.c.deps.Identity.RecoveryKey()
	if err != nil || key == nil {
		return nil, err
	}
	return recoverykey.Public(key)
}

// issued takes the reply to a renewal. A late reply to an earlier request is taken as well: it is for the same key, or
// it is refused.
func (r *runner) issued(ctx context.Context, e event) {
	if denial := fault.FromDenial(e.issued.GetDenied()); denial != nil {
		if e.issued.GetRequestId() == r.renewal.request {
			r.renewalDenied(ctx, denial)
		}
		return
	}
	id := r.c.deps.Identity
	if err := id.StoreIssued(e.issued.GetCertificateChainPem(), e.issued.GetRecoveryToken()); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "issued certificate not stored", slog.Any("error", err))
		if errors.Is(err, identity.ErrNotOurs) && e.issued.GetRequestId() != r.renewal.request {
			return
		}
		r.renewal.request = ""
		r.renewal.timer.Reset(r.renewIn(0))
		return
	}
	r.renewal.request = ""
	r.renewal.retry.Reset()
	failed := failpoint.Hit("agent.session.issued.after_fsync")
	if failed == nil {
		failed = r.c.out.Request(&nodev1.ConnectRequest{Frame: &nodev1.ConnectRequest_CertificateStored{
			CertificateStored: &nodev1.CertificateStored{RequestId: e.issued.GetRequestId()},
		}})
	}
	if failed != nil {
		// The control plane learns of the certificate from the session that opens with it.
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelDebug, "stored certificate not told", slog.Any("error", failed))
	}
	r.renewal.flip = true
	if !r.opening {
		r.useNext(ctx)
	}
}

// useNext takes the stored certificate into use, durably, and then opens a session with it beside the present one.
func (r *runner) useNext(ctx context.Context) {
	r.renewal.flip = false
	if err := r.c.deps.Identity.Flip(); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "next certificate not taken into use", slog.Any("error", err))
		r.renewal.timer.Reset(r.renewIn(0))
		return
	}
	r.flips = 0
	r.renewal.timer.Reset(r.answerWithin())
	r.schedule(0)
}

// resumeFlip takes a certificate into use that was stored before the process ended and never used.
func (r *runner) resumeFlip(ctx context.Context) {
	id := r.c.deps.Identity
	current, other := id.Certificate(), id.Other()
	if !identity.Usable(other, r.c.deps.Clock.Now()) ||
		(current != nil && !other.Leaf.NotAfter.After(current.Leaf.NotAfter)) {
		return
	}
	if err := id.Flip(); err != nil {
		r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "next certificate not taken into use", slog.Any("error", err))
	}
}

func (r *runner) renewalDenied(ctx context.Context, denial *fault.Error) {
	r.renewal.request = ""
	wait := r.renewIn(denial.RetryAfter)
	recorded := r.c.record(ctx, Diagnostic{
		Code:   commonv1.DiagnosticCode_DIAGNOSTIC_CODE_ENROLLMENT_REFUSED,
		Detail: "renewal: " + detailOf(denial), NextRetry: wait,
	})
	r.c.deps.Logger.LogAttrs(ctx, slog.LevelWarn, "renewal refused", append([]slog.Attr{
		slog.Any("error", denial), slog.Duration("next_retry", wait),
	}, recorded.Attrs()...)...)
	if denial.Reason == commonv1.Reason_REASON_CSR_REFUSED || denial.Reason == commonv1.Reason_REASON_KEY_REUSE {
		// The same key will not be signed, perhaps since half the life of its certificate is over: the next request has
		// another.
		if err := r.c.deps.Identity.DropRenewalKey(); err != nil {
			r.c.deps.Logger.LogAttrs(ctx, slog.LevelError, "key of a renewal not dropped", slog.Any("error", err))
		}
	}
	r.renewal.timer.Reset(wait)
}
