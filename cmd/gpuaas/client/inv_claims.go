package client

import (
	"context"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/spf13/cobra"
)

var claimView = view[*lifecyclev1.Claim]{
	name: (*lifecyclev1.Claim).GetClaimId,
	columns: []column[*lifecyclev1.Claim]{
		{title: "CLAIM", id: true, path: "claim_id"},
		{title: "KIND", path: "kind"},
		{title: "NAME", path: "name"},
		{title: "SCOPE", drop: 3, path: "scope"},
		{title: "STATE", of: func(_ *printer, c *lifecyclev1.Claim) string { return claimState(c) }},
		{title: "WORKSPACE", drop: 2, id: true, path: "workspace|workspace_id"},
		{title: "EPOCH", path: "epoch", wide: true},
		{title: "NODE", path: "node_name|node_id", wide: true},
		{title: "WORKSPACE ID", path: "workspace_id", wide: true},
		{title: "NODE ID", path: "node_id", wide: true},
		{title: "EXTERNAL", path: "external_ref", wide: true},
		{title: "ORPHANED BY", wide: true, path: "orphaned_by orphan_reason", as: joined},
	},
}

// claimState returns the state of a claim in one word.
func claimState(c *lifecyclev1.Claim) string {
	switch {
	case c.GetReleasedAt() != nil:
		return "released"
	case c.GetOrphanedAt() != nil:
		return "orphaned"
	case c.GetConfirmedAt() != nil:
		return "confirmed"
	}
	return "intended"
}

func claimsCommand(p *Program) *cobra.Command {
	var (
		page          paging
		workspace     string
		orphaned, all bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the resources that runs made or meant to make",
		Example: "  gpuaas claims list --orphaned", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			id, err := s.workspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return show(ctx, s, page, source[*lifecyclev1.Claim]{
				view: claimView,
				fetch: func(ctx context.Context, size int32, token string) ([]*lifecyclev1.Claim, string, error) {
					answer, err := s.query.ListClaims(ctx, &readmodelv1.ListClaimsRequest{
						PageSize: size, PageToken: token, WorkspaceId: id, OrphanedOnly: orphaned, IncludeReleased: all,
					})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().StringVar(&workspace, "workspace", "", "only those of this workspace")
	ls.Flags().BoolVar(&orphaned, "orphaned", false, "only those that were given up without being confirmed gone")
	ls.Flags().BoolVar(&all, "all", false, "released ones too")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	return group("claims", "Resources that operations made or meant to make", []string{"claim"}, ls)
}
