package inventory

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// ClaimView is how claims are printed.
var ClaimView = output.View[*lifecyclev1.Claim]{
	Name: (*lifecyclev1.Claim).GetClaimId,
	Columns: []output.Column[*lifecyclev1.Claim]{
		{Title: "CLAIM", ID: true, Path: "claim_id"},
		{Title: "KIND", Path: "kind"},
		{Title: "NAME", Path: "name"},
		{Title: "SCOPE", Drop: 3, Path: "scope"},
		{Title: "STATE", Of: func(_ *output.Printer, c *lifecyclev1.Claim) string { return claimState(c) }},
		{Title: "WORKSPACE", Drop: 2, ID: true, Path: "workspace|workspace_id"},
		{Title: "EPOCH", Path: "epoch", Wide: true},
		{Title: "NODE", Path: "node_name|node_id", Wide: true},
		{Title: "WORKSPACE ID", Path: "workspace_id", Wide: true},
		{Title: "NODE ID", Path: "node_id", Wide: true},
		{Title: "EXTERNAL", Path: "external_ref", Wide: true},
		{Title: "ORPHANED BY", Wide: true, Path: "orphaned_by orphan_reason", As: output.Joined},
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

// ClaimsCommand returns the commands about claims.
func ClaimsCommand(p *kit.Program) *cobra.Command {
	var (
		page          kit.Paging
		workspace     string
		orphaned, all bool
	)
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the resources that runs made or meant to make",
		Example: "  gpuaas claims list --orphaned", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			id, err := s.WorkspaceID(ctx, workspace)
			if err != nil {
				return err
			}
			return kit.Show(ctx, s, page, kit.Source[*lifecyclev1.Claim]{
				View: ClaimView,
				Fetch: kit.Method(s.Query.ListClaims,
					&readmodelv1.ListClaimsRequest{WorkspaceId: id, OrphanedOnly: orphaned, IncludeReleased: all}),
			})
		}),
	}
	page.Flags(ls)
	p.WorkspaceFlag(ls, &workspace)
	ls.Flags().BoolVar(&orphaned, "orphaned", false, "only those that were given up without being confirmed gone")
	ls.Flags().BoolVar(&all, "all", false, "released ones too")
	return kit.Group("claims", "Resources that operations made or meant to make", []string{"claim"}, ls)
}
