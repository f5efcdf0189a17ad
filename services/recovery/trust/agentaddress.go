package trust

import (
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

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
