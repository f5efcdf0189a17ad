package client

import (
	"context"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/spf13/cobra"
)

var tenantView = view[*lifecyclev1.Tenant]{
	name: (*lifecyclev1.Tenant).GetName,
	columns: []column[*lifecyclev1.Tenant]{
		{title: "NAME", path: "name"},
		{title: "WORKSPACES", drop: 1, path: "quota.workspaces"},
		{title: "GPUS", drop: 2, path: "quota.gpus"},
		{title: "STORAGE", drop: 3, path: "quota.storage_bytes", as: inBytes},
		{title: "CREATED", drop: 4, moves: true, path: "created_at"},
		{title: "ID", path: "tenant_id", wide: true},
	},
}

func tenantsCommand(p *Program) *cobra.Command {
	var quota struct {
		workspaces, gpus int32
		storage          string
	}
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a tenant with its quota; one that exists is left as it is",
		Example: "  gpuaas tenants create acme --workspaces 10 --gpus 8 --storage 1Ti",
		Args:    args("NAME"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			bytes, err := parseBytes(quota.storage)
			if err != nil {
				return Usage(fmt.Errorf("--storage: %w", err))
			}
			answer, err := s.command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
				Name: args[0], Quota: &lifecyclev1.Quota{Workspaces: quota.workspaces, Gpus: quota.gpus, StorageBytes: bytes},
			})
			if err != nil {
				return err
			}
			return one(s.printer, tenantView, answer.GetTenant(), with("existed", answer.GetExisted()),
				with("pos", answer.GetPos()))
		}),
	}
	create.Flags().Int32Var(&quota.workspaces, "workspaces", 100, "workspaces that it may have at once")
	create.Flags().Int32Var(&quota.gpus, "gpus", 64, "GPUs that it may hold at once")
	create.Flags().StringVar(&quota.storage, "storage", "1Ti", "storage that it may hold at once")

	var page paging
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tenants with their quotas", Example: "  gpuaas tenants list",
		Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*lifecyclev1.Tenant]{view: tenantView, fetch: tenants(s)})
		}),
	}
	page.flags(ls)
	get := &cobra.Command{
		Use: "get TENANT", Short: "Show one tenant", Example: "  gpuaas tenants get acme", Args: args("TENANT"),
		ValidArgsFunction: onlyFirst(p.completeTenants),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			items, _, err := pages(0, "", func(size int32, token string) ([]*lifecyclev1.Tenant, string, error) {
				return tenants(s)(ctx, size, token)
			})
			if err != nil {
				return err
			}
			ref := args[0]
			of := func(t *lifecyclev1.Tenant) bool { return t.GetName() == ref || t.GetTenantId() == ref }
			at := slices.IndexFunc(items, of)
			if at < 0 { // a part of an id
				if ref, err = s.tenantID(ctx, ref); err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
					return err
				}
				at = slices.IndexFunc(items, of)
			}
			if at < 0 {
				return fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, fmt.Sprintf("there is no tenant %q", args[0]))
			}
			return one(s.printer, tenantView, items[at])
		}),
	}
	return group("tenants", "Tenants and their quotas", []string{"tenant"}, create, ls, get)
}

// tenants returns a function that reads a page of the tenants.
func tenants(s *session) func(context.Context, int32, string) ([]*lifecyclev1.Tenant, string, error) {
	return func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Tenant, string, error) {
		answer, err := s.query.ListTenants(ctx, &readmodelv1.ListTenantsRequest{PageSize: size, PageToken: token})
		return answer.GetItems(), answer.GetNextPageToken(), err
	}
}
