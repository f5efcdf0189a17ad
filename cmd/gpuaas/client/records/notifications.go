package records

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// NotificationView is how notifications are printed.
var NotificationView = output.View[*readmodelv1.Notification]{
	Name: (*readmodelv1.Notification).GetImpactId,
	Columns: []output.Column[*readmodelv1.Notification]{
		{Title: "WORKSPACE", Path: "workspace|workspace_id"},
		{Title: "LAYER", Drop: 3, Path: "layer"},
		{Title: "STATE", Path: "user_state"},
		{Title: "EVENT", Path: "event"},
		{Title: "SINCE", Drop: 1, Moves: true, Path: "began_at"},
		{Title: "ENDED", Drop: 2, Moves: true, Path: "ended_at"},
		{Title: "TEXT", Text: true, Path: "text"},
		{Title: "REASON", Path: "operator_reason", Wide: true},
		{Title: "NODE", Path: "node_name|node_id", Wide: true},
		{Title: "TIMES", Moves: true, Path: "count", Wide: true},
		{Title: "FIRST SHOWN", Path: "first_shown_at", Wide: true},
		{Title: "VERDICT STALE SINCE", Path: "verdict_stale_since", Wide: true},
		{Title: "INCIDENT", ID: true, Path: "incident_id", Wide: true},
		{Title: "ALLOCATION", ID: true, Path: "allocation_id", Wide: true},
		{Title: "EVIDENCE", Path: "evidence", As: output.Lines, Wide: true},
		{Title: "IMPACT", ID: true, Path: "impact_id", Wide: true},
	},
}

// NotificationsCommand returns the commands about notifications.
func NotificationsCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListNotificationsRequest{}
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List how workspaces are or were disturbed, each in its own words",
		Example: "  gpuaas notifications list --open\n  gpuaas notifications list --workspace acme/demo2 -o json\n" +
			"  gpuaas notifications list --incident 0197c0de-0000-7000-8000-000000000001 -o wide",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			if req.GetIncidentId() != "" {
				id, err := s.ID(ctx, kit.KindIncident, req.GetIncidentId())
				if err != nil {
					return err
				}
				req.IncidentId = id
			}
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.Notification]{
				View:  NotificationView,
				Fetch: kit.Method(s.Client.Notifications.ListNotifications, req),
			})
		}),
	}
	page.Flags(ls)
	ls.Flags().BoolVar(&req.OpenOnly, "open", false, "only what lasts")
	ls.Flags().StringVar(&req.IncidentId, "incident", "", "only those that this incident covers; for operators")
	p.WorkspaceFlag(ls, &req.Workspace)
	return kit.Group("notifications", "What disturbs workspaces, as their people are told", []string{"notification"}, ls)
}
