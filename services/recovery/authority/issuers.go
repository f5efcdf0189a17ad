package authority

import (
	"bytes"
	"context"
	"slices"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// issuers are the roots that watchers were sent last.
type issuers struct {
	frame *recoveryv1.AuthorityIssuers // nil: never read
	read  events.Reading
}

// readIssuers reads the roots if they may have changed, which they do with an event; nil: they are as they were.
func (p *Poller) readIssuers(ctx context.Context) (*recoveryv1.AuthorityIssuers, error) {
	p.mu.Lock()
	was := p.issuers
	p.mu.Unlock()
	if was.frame != nil && !was.read.Due(p.cfg.IssuersEvery) {
		return nil, nil
	}
	reading := p.deps.Numbered.Reading()
	ctx, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	list, err := roots.Certificates(ctx, p.deps.Pool)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.issuers.read = reading
	if was.frame != nil && slices.EqualFunc(list, was.frame.GetCertificates(), bytes.Equal) {
		return nil, nil
	}
	return &recoveryv1.AuthorityIssuers{Certificates: list}, nil
}

// sendIssuersLocked sends watchers the roots.
func (p *Poller) sendIssuersLocked(frame *recoveryv1.AuthorityIssuers) {
	if frame == nil {
		return
	}
	p.issuers.frame = frame
	for w := range p.watchers {
		p.offerLocked(w, issuersFrame(frame))
	}
}

func issuersFrame(frame *recoveryv1.AuthorityIssuers) *recoveryv1.WatchAuthorityResponse {
	return &recoveryv1.WatchAuthorityResponse{Frame: &recoveryv1.WatchAuthorityResponse_Issuers{Issuers: frame}}
}
