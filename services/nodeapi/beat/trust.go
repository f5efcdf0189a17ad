package beat

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/replicas"
)

// trustEvery is how often it is checked, in memory, whether the agents' port trusts something else.
const trustEvery = time.Second

// publishChangedTrust publishes what the agents' port trusts between two beats, if it has changed since it was
// published.
func (p *Publisher) publishChangedTrust(ctx context.Context) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.left || p.trust == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, replicas.Every)
	defer cancel()
	p.publishTrust(ctx, false)
}

// publishTrust writes what the agents' port trusts into the replica's row, if the row has something else or is new. The
// next beat tries again what has failed.
func (p *Publisher) publishTrust(ctx context.Context, fresh bool) {
	if p.deps.Trust == nil {
		return
	}
	now := p.deps.Trust()
	now.ClientCAs = slices.Sorted(slices.Values(now.ClientCAs))
	if !fresh && p.trust != nil && p.trust.AgentAddress == now.AgentAddress &&
		slices.Equal(p.trust.ClientCAs, now.ClientCAs) {
		return
	}
	if err := replicas.WriteTrust(ctx, p.deps.DB, p.deps.ReplicaID, now); err != nil {
		p.trust = nil
		p.deps.Logger.WarnContext(ctx, "what the agents' port trusts is not published", slog.Any("error", err))
		return
	}
	p.trust = &now
}
