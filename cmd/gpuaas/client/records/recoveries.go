package records

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// RecoveryView is how recoveries are printed.
var RecoveryView = output.View[*recoveryv1.RecoveryRecord]{
	Name: (*recoveryv1.RecoveryRecord).GetRecordId,
	Columns: []output.Column[*recoveryv1.RecoveryRecord]{
		{Title: "WORKSPACE", Path: "workspace"},
		{Title: "DETECTED", Drop: 3, Moves: true, Path: "detected_at"},
		{Title: "TRIGGER", Drop: 4, Path: "trigger"},
		{Title: "OUTCOME", Path: "outcome"},
		{Title: "STEP", Drop: 1, Path: "step"},
		{Title: "WHAT WORKED", Drop: 2, Path: "what_worked"},
		{Title: "TOOK", Drop: 5, Moves: true, Path: "total_seconds"},
		{Title: "WITHHELD", Text: true, Of: func(pr *output.Printer, r *recoveryv1.RecoveryRecord) string {
			return r.GetWithheldBecause() + human.OnlyIf(r.GetNextAt() != nil, " (next "+pr.When(r.GetNextAt())+")")
		}},
		{Title: "CAUSE", Path: "cause", Wide: true},
		{Title: "ERROR", Path: "error_code", Wide: true},
		{Title: "ATTEMPTS", Path: "attempts", Wide: true},
		{Title: "USER IMPACT", Path: "user_impact", Wide: true},
		{Title: "OPERATION", Path: "operation_id", Wide: true},
		{Title: "RECORD", Path: "record_id", Wide: true},
	},
}

// RecoveriesCommand returns the command that lists the recoveries of a workspace.
func RecoveriesCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	cmd := &cobra.Command{
		Use: "recoveries WS", Short: "Show how the workspace was brought back, or why it was not: step, cause, what " +
			"worked, time and impact",
		Example:           "  gpuaas workspaces recoveries acme/demo2\n  gpuaas workspaces recoveries acme/demo2 -o wide",
		Args:              kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			return kit.Show(ctx, s, page, kit.Source[*recoveryv1.RecoveryRecord]{
				View:  RecoveryView,
				Fetch: kit.Method(s.Client.Incidents.ListRecoveries, &readmodelv1.ListRecoveriesRequest{Workspace: args[0]}),
			})
		}),
	}
	page.Flags(cmd)
	return cmd
}
