package inventory

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TenantView is how tenants are printed.
var TenantView = output.View[*lifecyclev1.Tenant]{
	Name: (*lifecyclev1.Tenant).GetName,
	Columns: []output.Column[*lifecyclev1.Tenant]{
		{Title: "NAME", Path: "name"},
		{Title: "WORKSPACES", Drop: 1, Path: "quota.workspaces"},
		{Title: "GPUS", Drop: 2, Path: "quota.gpus"},
		{Title: "STORAGE", Drop: 3, Path: "quota.storage_bytes", As: output.InBytes},
		{Title: "CREATED", Drop: 4, Moves: true, Path: "created_at"},
		{Title: "ID", Path: "tenant_id", Wide: true},
	},
}

// TenantsCommand returns the commands about tenants.
func TenantsCommand(p *kit.Program) *cobra.Command {
	var quota struct {
		workspaces, gpus int32
		storage          string
	}
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a tenant with its quota; one that exists is left as it is",
		Example: "  gpuaas tenants create acme --workspaces 10 --gpus 8 --storage 1Ti",
		Args:    kit.Args("NAME"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			bytes, err := human.ParseBytes(quota.storage)
			if err != nil {
				return exit.Usage(fmt.Errorf("--storage: %w", err))
			}
			answer, err := s.Command.CreateTenant(ctx, &readmodelv1.CreateTenantRequest{
				Name: args[0], Quota: &lifecyclev1.Quota{Workspaces: quota.workspaces, Gpus: quota.gpus, StorageBytes: bytes},
			})
			if err != nil {
				return err
			}
			return output.One(s.Printer, TenantView, answer.GetTenant(), output.With("existed", answer.GetExisted()),
				output.With("pos", answer.GetPos()))
		}),
	}
	create.Flags().Int32Var(&quota.workspaces, "workspaces", 100, "workspaces that it may have at once")
	create.Flags().Int32Var(&quota.gpus, "gpus", 64, "GPUs that it may hold at once")
	create.Flags().StringVar(&quota.storage, "storage", "1Ti", "storage that it may hold at once")

	var page kit.Paging
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tenants with their quotas", Example: "  gpuaas tenants list",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*lifecyclev1.Tenant]{View: TenantView, Fetch: tenants(s)})
		}),
	}
	page.Flags(ls)
	get := &cobra.Command{
		Use: "get TENANT", Short: "Show one tenant", Example: "  gpuaas tenants get acme", Args: kit.Args("TENANT"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteTenants),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			items, _, err := kit.Pages(ctx, 0, "", tenants(s))
			if err != nil {
				return err
			}
			ref := args[0]
			of := func(t *lifecyclev1.Tenant) bool { return t.GetName() == ref || t.GetTenantId() == ref }
			at := slices.IndexFunc(items, of)
			if at < 0 { // a part of an id
				if ref, err = s.TenantID(ctx, ref); err != nil && !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
					return err
				}
				at = slices.IndexFunc(items, of)
			}
			if at < 0 {
				return fault.New(commonv1.Reason_REASON_TENANT_UNKNOWN, fmt.Sprintf("there is no tenant %q", args[0]))
			}
			return output.One(s.Printer, TenantView, items[at])
		}),
	}
	return kit.Group("tenants", "Tenants and their quotas", []string{"tenant"}, create, ls, get)
}

// tenants returns a function that reads a page of the tenants.
func tenants(s *kit.Session) kit.Fetch[*lifecyclev1.Tenant] {
	return kit.Method(s.Query.ListTenants, &readmodelv1.ListTenantsRequest{})
}
