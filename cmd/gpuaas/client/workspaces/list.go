package workspaces

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

func listCommand(p *kit.Program) *cobra.Command {
	var (
		page  kit.Paging
		state string
	)
	var tenant string
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
				Fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.Workspace, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.Query.ListWorkspaces(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.Flags(cmd)
	cmd.Flags().StringVar(&tenant, "tenant", "", "only those of this tenant: its name, its id or a part of the id")
	cmd.Flags().StringVar(&state, "state", "",
		"only those in this state: "+strings.Join(names.Spellings[commonv1.WorkspaceState](), ", "))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.CompleteTenants)
	_ = cmd.RegisterFlagCompletionFunc("state",
		cobra.FixedCompletions(names.Spellings[commonv1.WorkspaceState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func getCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "get WS", Aliases: []string{"describe"},
		Short:   "Show one workspace (an id, tenant/name, or a bare name if it is unique)",
		Example: "  gpuaas workspaces get acme/demo2", Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return output.One(s.Printer, View, answer.GetWorkspace())
		}),
	}
}
