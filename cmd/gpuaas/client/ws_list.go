package client

import (
	"context"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/spf13/cobra"
)

func workspacesList(p *Program) *cobra.Command {
	var (
		page  paging
		state string
	)
	var tenant string
	req := &readmodelv1.ListWorkspacesRequest{}
	cmd := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List workspaces",
		Example: "  gpuaas workspaces list --tenant acme --state active", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			var err error
			if req.State, err = parseEnum[commonv1.WorkspaceState]("state", state); err != nil {
				return err
			}
			if req.Tenant, err = s.tenantID(ctx, tenant); err != nil {
				return err
			}
			return show(ctx, s, page, source[*readmodelv1.Workspace]{
				view: workspaceView, topic: readmodelv1.Topic_TOPIC_WORKSPACES, changed: (*readmodelv1.WatchItem).GetWorkspace,
				keep: func(w *readmodelv1.Workspace) bool {
					tenant := req.GetTenant()
					return (tenant == "" || w.GetTenant() == tenant || w.GetTenantId() == tenant) &&
						(req.GetState() == commonv1.WorkspaceState_WORKSPACE_STATE_UNSPECIFIED || w.GetState() == req.GetState())
				},
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.Workspace, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.query.ListWorkspaces(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	cmd.Flags().StringVar(&tenant, "tenant", "", "only those of this tenant: its name, its id or a part of the id")
	cmd.Flags().StringVar(&state, "state", "",
		"only those in this state: "+strings.Join(names.Spellings[commonv1.WorkspaceState](), ", "))
	_ = cmd.RegisterFlagCompletionFunc("tenant", p.completeTenants)
	_ = cmd.RegisterFlagCompletionFunc("state",
		cobra.FixedCompletions(names.Spellings[commonv1.WorkspaceState](), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func workspacesGet(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "get WS", Aliases: []string{"describe"},
		Short:   "Show one workspace (an id, tenant/name, or a bare name if it is unique)",
		Example: "  gpuaas workspaces get acme/demo2", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.query.GetWorkspace(ctx, &readmodelv1.GetWorkspaceRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return one(s.printer, workspaceView, answer.GetWorkspace())
		}),
	}
}
