package workspaces

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func listCommand(p *kit.Program) *cobra.Command {
	var (
		page          kit.Paging
		state, tenant string
	)
	req := &readmodelv1.ListWorkspacesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List workspaces",
		Example: "  gpuaas workspaces list --tenant acme --state active", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			var err error
			if req.State, err = kit.ParseEnum[commonv1.WorkspaceState]("state", state); err != nil {
				return err
			}
			if req.Tenant, err = s.TenantID(ctx, tenant); err != nil {
				return err
			}
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.Workspace]{
				View: View, Topic: readmodelv1.Topic_TOPIC_WORKSPACES, Changed: (*readmodelv1.WatchItem).GetWorkspace,
				Keep: func(w *readmodelv1.Workspace) bool {
					tenant := req.GetTenant()
					return (tenant == "" || w.GetTenant() == tenant || w.GetTenantId() == tenant) &&
						(req.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED || w.GetState() == req.GetState())
				},
				Fetch: kit.Method(s.Query.ListWorkspaces, req),
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&tenant, "tenant", "", "only those of this tenant: its name, its id or a part of the id")
	kit.EnumFlag[commonv1.WorkspaceState](cmd, &state, "state", "only those in this state: %s")
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.CompleteTenants)
	return cmd
}

func getCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "get WS", Aliases: []string{"describe"},
		Short: "Show one workspace (an id, tenant/name, or a bare name if it is unique)",
		Long: "Show one workspace: an id, tenant/name, or a bare name if it is unique.\n\n" +
			"Three layers are shown apart. MANAGEMENT is whether the agent of its machine is connected; while it is away,\n" +
			"operations may wait, and nothing is said of what runs. RUNTIME is what the agent last reported of the\n" +
			"workloads: ready, running, crash_loop or stopped, or stale once it reports nothing new. EDGE is whether the\n" +
			"endpoints can be reached: unknown as long as nothing probes them. FOR ITS USER is what the user state means,\n" +
			"whether to wait, and whom to ask.",
		Example: "  gpuaas workspaces get acme/demo2", Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			return kit.Get(ctx, s, View, s.Query.GetWorkspace, &readmodelv1.GetWorkspaceRequest{Workspace: args[0]},
				(*readmodelv1.GetWorkspaceResponse).GetWorkspace)
		}),
	}
}
