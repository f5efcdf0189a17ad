package authority

import (
	"bytes"
	"context"
	"slices"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// issuers are the roots that watchers were sent last.
type issuers struct {
	frame *recoveryv1.AuthorityIssuers // nil: never read
	read  events.Reading
}

// readRoots is what a poll read of the roots.
type readRoots struct {
	certificates [][]byte
	read         events.Reading
}

// rootsDue reports whether the roots may have changed, which they do with an event.
func (p *Poller) rootsDue() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.issuers.frame == nil || p.issuers.read.Due(p.cfg.IssuersEvery)
}

// readRoots reads the roots.
func (p *Poller) readRoots(ctx context.Context, q pg.Querier) (*readRoots, error) {
	reading := p.deps.Numbered.Reading()
	ctx, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	list, err := roots.Certificates(ctx, q)
	if err != nil {
		return nil, err
	}
	return &readRoots{certificates: list, read: reading}, nil
}

// sendIssuersLocked sends watchers the roots, unless they are those that were sent last.
func (p *Poller) sendIssuersLocked(now *readRoots) {
	if now == nil {
		return
	}
	p.issuers.read = now.read
	if p.issuers.frame != nil && slices.EqualFunc(now.certificates, p.issuers.frame.GetCertificates(), bytes.Equal) {
		return
	}
	p.issuers.frame = &recoveryv1.AuthorityIssuers{Certificates: now.certificates}
	for w := range p.watchers {
		p.offerLocked(w, issuersFrame(p.issuers.frame))
	}
}

func issuersFrame(frame *recoveryv1.AuthorityIssuers) *recoveryv1.WatchAuthorityResponse {
	return &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Issuers{Issuers: frame}}
}
