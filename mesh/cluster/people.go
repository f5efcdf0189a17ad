package cluster

import (
	"context"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/person"
)

// Person returns a connection of another person than the cluster's operator: of a tenant's person, or of one of the
// operator's people if tenantID is empty. The caller closes it.
func (c *Cluster) Person(ctx context.Context, tenantID string, s person.Session) (*person.Client, error) {
	url, err := config.SecretFile(c.Material.URLFile(pg.RoleReadmodel)).Read()
	if err != nil {
		return nil, err
	}
	token, err := person.Issue(ctx, url.Reveal(), tenantID, s)
	if err != nil {
		return nil, err
	}
	return person.Reach(c.Material, TrustDomain, c.Plan.Addresses.Console, token)
}
