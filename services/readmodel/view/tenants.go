package view

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
)

const theTenant condition = "t.tenant_id = ?::uuid"

var tenantLayout = layout{
	name: "tenants", columns: "t.body", from: "readmodel.tenant t", sort: "t.name", id: "t.tenant_id", lead: 1,
	tenant: "t.tenant_id", conditions: []condition{theTenant},
}

var listTenants = pg.DefineDynamic(pg.RoleReadmodel, "view.list_tenants", tenantLayout.compose,
	tenantLayout.samples()...)

// Tenants returns one page of tenants, ordered by name.
func (s *Snapshot) Tenants(ctx context.Context, page Page) ([]*lifecyclev1.Tenant, string, error) {
	return run(ctx, s, listing{layout: &tenantLayout, statement: listTenants, args: []any{s.scope.arg()}}, page,
		fromBody[lifecyclev1.Tenant])
}

// Tenant returns one tenant by name, by id or by a part of the id.
func (s *Snapshot) Tenant(ctx context.Context, ref string) (*lifecyclev1.Tenant, error) {
	id, err := s.find().lookUp(ctx, readmodelv1.ObjectKind_OBJECT_KIND_TENANT, ref)
	if err != nil {
		return nil, err
	}
	l := listing{layout: &tenantLayout, statement: listTenants, args: []any{s.scope.arg()}}
	l.and(theTenant, id)
	found, _, err := run(ctx, s, l, Page{Size: 1}, fromBody[lifecyclev1.Tenant])
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, notFound("tenant")
	}
	return found[0], nil
}
