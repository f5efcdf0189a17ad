package client

import (
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/spf13/cobra"
)

var recoveryView = view[*recoveryv1.RecoveryRecord]{
	name: (*recoveryv1.RecoveryRecord).GetRecordId,
	columns: []column[*recoveryv1.RecoveryRecord]{
		{title: "WORKSPACE", path: "workspace"},
		{title: "DETECTED", drop: 3, moves: true, path: "detected_at"},
		{title: "TRIGGER", drop: 4, path: "trigger"},
		{title: "OUTCOME", path: "outcome"},
		{title: "STEP", drop: 1, path: "step"},
		{title: "WHAT WORKED", drop: 2, path: "what_worked"},
		{title: "TOOK", drop: 5, moves: true, path: "total_seconds"},
		{title: "WITHHELD", text: true, of: func(pr *printer, r *recoveryv1.RecoveryRecord) string {
			return r.GetWithheldBecause() + onlyIf(r.GetNextAt() != nil, " (next "+pr.when(r.GetNextAt())+")")
		}},
		{title: "CAUSE", path: "cause", wide: true},
		{title: "ERROR", path: "error_code", wide: true},
		{title: "ATTEMPTS", path: "attempts", wide: true},
		{title: "USER IMPACT", path: "user_impact", wide: true},
		{title: "OPERATION", path: "operation_id", wide: true},
		{title: "RECORD", path: "record_id", wide: true},
	},
}

func workspacesRecoveries(p *Program) *cobra.Command {
	var page paging
	cmd := &cobra.Command{
		Use: "recoveries WS", Short: "Show how the workspace was brought back, or why it was not: step, cause, what worked, time and impact",
		Example:           "  gpuaas workspaces recoveries acme/demo2\n  gpuaas workspaces recoveries acme/demo2 -o wide",
		Args:              args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			return show(ctx, s, page, source[*recoveryv1.RecoveryRecord]{
				view: recoveryView,
				fetch: func(ctx context.Context, size int32, token string) ([]*recoveryv1.RecoveryRecord, string, error) {
					answer, err := s.client.Incidents.ListRecoveries(ctx,
						&readmodelv1.ListRecoveriesRequest{Workspace: args[0], PageSize: size, PageToken: token})
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(cmd)
	return cmd
}
