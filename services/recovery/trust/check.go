package trust

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
)

// target is one address of the ingress.
type target struct {
	replica replicas.Trusting // zero: the address that agents are told
	address string            // empty: it is not known
	listed  bool              // what the replica publishes has an anchor of the authority
	outcome recoveryv1.HandshakeOutcome
	detail  string
}

// name returns how people know the target.
func (t *target) name() string {
	if t.replica.ReplicaID == "" {
		return t.address
	}
	return "replica " + t.replica.ReplicaID + " of nodeapi at " + t.address
}

// check is what one check has found.
type check struct {
	at        time.Time // the database's clock, when it began
	authority *authority
	err       error // why there is no authority, or no canary certificate
	targets   []*target
}

// with returns the targets of an outcome.
func (c *check) with(outcome recoveryv1.HandshakeOutcome) []*target {
	return slices.DeleteFunc(slices.Clone(c.targets), func(t *target) bool { return t.outcome != outcome })
}

// targetsOf returns the addresses of the ingress: that which agents are told, and those that replicas publish. An
// address that both have is there once, as the replica's.
func targetsOf(published string, list []replicas.Trusting, a *authority) []*target {
	var out []*target
	known := false
	for _, r := range list {
		known = known || r.AgentAddress == published
		out = append(out, &target{replica: r, address: r.AgentAddress, listed: a != nil && a.trustedBy(r.ClientCAs)})
	}
	if published != "" && !known {
		out = slices.Insert(out, 0, &target{address: published})
	}
	return out
}

// signature returns a text that differs after either side has published something else.
func signature(a *authority, list []replicas.Trusting) string {
	var text strings.Builder
	if a != nil {
		text.WriteString(strings.Join(a.anchors, ","))
	}
	for _, r := range list {
		text.WriteString(" " + r.ReplicaID + "@" + r.AgentAddress + "=" + strings.Join(r.ClientCAs, ","))
	}
	return text.String()
}

// shakeHands makes the handshakes with all targets at once: they are few, and a check must end within the lease. The
// address that agents are told may be a proxy's: it is verified by roots of its own, as agents do.
func shakeHands(ctx context.Context, targets []*target, cfg pki.ClientConfig, roots *pki.Bundle, within time.Duration) {
	var all sync.WaitGroup
	for _, t := range targets {
		if t.address == "" {
			continue
		}
		as := cfg
		if t.replica.ReplicaID == "" {
			as.Roots = roots
		}
		all.Go(func() { t.outcome, t.detail = canary.Handshake(ctx, t.address, as, within) })
	}
	all.Wait()
}

// ingress returns the targets as responses carry them.
func (c *check) ingress() []*recoveryv1.IngressTrust {
	out := make([]*recoveryv1.IngressTrust, 0, len(c.targets))
	for _, t := range c.targets {
		out = append(out, &recoveryv1.IngressTrust{
			ReplicaId: t.replica.ReplicaID, Address: t.address, ClientCaFingerprints: t.replica.ClientCAs,
			IssuerTrusted: t.listed, Handshake: t.outcome, Detail: t.detail,
		})
	}
	return out
}

// result returns what the check alone shows.
func (c *check) result() recoveryv1.PreflightState {
	switch {
	case len(c.with(canary.Refused)) > 0:
		return mismatch
	case len(c.with(canary.Trusted)) > 0:
		return agree
	}
	return unknown
}

// agentAddress returns the host:port of the node API that agents are told, which read it in the same way.
func (p *Preflight) agentAddress() string {
	agentAddress := p.deps.Address()
	if address, err := config.HostPort(agentAddress); err == nil {
		return address
	}
	return agentAddress // of no form that agents take: the check says that it is not reached
}

// agentRoots returns the roots by which agents verify the address that they are told.
func (p *Preflight) agentRoots() *pki.Bundle {
	if p.deps.AgentRoots != nil {
		if roots := p.deps.AgentRoots(); roots != nil {
			return roots
		}
	}
	return p.deps.Services
}
