package trust

import (
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

// told returns the host:port of the node API that agents are told, which read it in the same way.
func (p *Preflight) told() string {
	told := p.deps.Address()
	if address, err := config.HostPort(told); err == nil {
		return address
	}
	return told // of no form that agents take: the check says that it is not reached
}

// toldRoots returns the roots by which agents verify the address that they are told.
func (p *Preflight) toldRoots() *pki.Bundle {
	if p.deps.Told != nil {
		if roots := p.deps.Told(); roots != nil {
			return roots
		}
	}
	return p.deps.Services
}
