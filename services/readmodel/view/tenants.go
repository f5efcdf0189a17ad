package view

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

const theTenant list.Condition = "t.tenant_id = ?::uuid"

var tenantLayout = list.Layout{
	Name: "tenants", Columns: "t.body", From: "readmodel.tenant t", Sort: "t.name", ID: "t.tenant_id", Lead: 1,
	Tenant: "t.tenant_id", Conditions: []list.Condition{theTenant},
}

var listTenants = pg.DefineDynamic(pg.RoleReadmodel, "view.list_tenants", tenantLayout.Compose,
	tenantLayout.Samples()...)

// Tenants returns one page of tenants, ordered by name.
func (s *Snapshot) Tenants(ctx context.Context, page list.Page) ([]*lifecyclev1.Tenant, string, error) {
	return run(ctx, s, list.Request{Layout: &tenantLayout, Statement: listTenants, Args: []any{s.scope.Arg()}}, page,
		fromBody[lifecyclev1.Tenant])
}

// Tenant returns one tenant by name, by id or by a part of the id.
func (s *Snapshot) Tenant(ctx context.Context, ref string) (*lifecyclev1.Tenant, error) {
	id, err := s.find().IDOf(ctx, readmodelv1.ObjectKind_OBJECT_KIND_TENANT, ref)
	if err != nil {
		return nil, err
	}
	l := list.Request{Layout: &tenantLayout, Statement: listTenants, Args: []any{s.scope.Arg()}}
	l.And(theTenant, id)
	found, _, err := run(ctx, s, l, list.Page{Size: 1}, fromBody[lifecyclev1.Tenant])
	return only(found, err, "tenant", ref)
}
