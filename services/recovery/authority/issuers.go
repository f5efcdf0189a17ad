package authority

import (
	"bytes"
	"context"
	"slices"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
)

// issuersEvery is how often the roots that replicas of nodeapi are sent are read.
const issuersEvery = time.Second

// issuers are the roots that watchers were sent last.
type issuers struct {
	frame  *recoveryv1.AuthorityIssuers // nil: never read
	readAt time.Time
}

// readIssuers reads the roots if they may have changed; nil: they are as they were.
func (p *Poller) readIssuers(ctx context.Context, now time.Time) (*recoveryv1.AuthorityIssuers, error) {
	p.mu.Lock()
	was := p.issuers
	p.mu.Unlock()
	if was.frame != nil && now.Sub(was.readAt) < issuersEvery {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout())
	defer cancel()
	list, err := roots.Certificates(ctx, p.deps.Pool)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.issuers.readAt = now
	if was.frame != nil && slices.EqualFunc(list, was.frame.GetCertificates(), bytes.Equal) {
		return nil, nil
	}
	return &recoveryv1.AuthorityIssuers{Certificates: list}, nil
}

// tellIssuersLocked sends watchers the roots.
func (p *Poller) tellIssuersLocked(frame *recoveryv1.AuthorityIssuers) {
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
