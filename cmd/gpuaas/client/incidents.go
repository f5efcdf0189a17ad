package client

import (
	"context"

	"github.com/spf13/cobra"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

var incidentView = view[*recoveryv1.Incident]{
	name: (*recoveryv1.Incident).GetIncidentId,
	columns: []column[*recoveryv1.Incident]{
		{title: "INCIDENT", id: true, path: "incident_id"},
		{title: "KIND", path: "kind"},
		{title: "SEVERITY", path: "severity", as: upper},
		{title: "SUMMARY", text: true, path: "summary"},
		{title: "WORKSPACES", drop: 2, path: "workspace_ids", as: length},
		{title: "SINCE", drop: 1, moves: true, path: "opened_at"},
		{title: "CLOSED", drop: 3, moves: true, path: "closed_at"},
		{title: "NEXT ACTION", path: "next_action", wide: true},
		{title: "OWNER", path: "owner_layer", wide: true},
		{title: "STEP", path: "step", wide: true},
		{title: "ERROR", path: "error_code", wide: true},
	},
	more: []column[*recoveryv1.Incident]{
		{title: "LAST SEEN", path: "last_seen_at"},
		{title: "SEEN", path: "count", as: nonzero},
		{title: "CLOSED BY", path: "closed_by"},
		{title: "TENANTS", path: "tenant_ids", as: lines},
		{title: "WORKSPACE", path: "workspaces workspace_ids", as: nameOrID},
		{title: "NODES", path: "node_names node_ids", as: nameOrID},
	},
}

func incidentsCommand(p *Program) *cobra.Command {
	var page paging
	req := &readmodelv1.ListIncidentsRequest{}
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List open incidents",
		Example: "  gpuaas incidents list\n  gpuaas incidents list --all", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			return show(ctx, s, page, source[*recoveryv1.Incident]{
				view: incidentView,
				fetch: func(ctx context.Context, size int32, token string) ([]*recoveryv1.Incident, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.client.Incidents.ListIncidents(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	page.flags(ls)
	ls.Flags().BoolVar(&req.IncludeClosed, "all", false, "the closed ones as well")
	get := &cobra.Command{
		Use: "get INCIDENT", Short: "Show one incident with the recoveries that it speaks of",
		Example: "  gpuaas incidents get 0197c0de-0000-7000-8000-000000000001", Args: args("INCIDENT"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			id, err := s.id(ctx, kindIncident, args[0])
			if err != nil {
				return err
			}
			answer, err := s.client.Incidents.GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: id})
			if err != nil {
				return err
			}
			if s.structured() {
				return object(s.printer, answer.GetIncident(), with("recoveries", messages(answer.GetRecoveries()...)))
			}
			if err := one(s.printer, incidentView, answer.GetIncident()); err != nil || s.format == formatName ||
				len(answer.GetRecoveries()) == 0 {
				return err
			}
			return under(s.printer, recoveryView.columns, answer.GetRecoveries())
		}),
	}
	return group("incidents", "Failures of the control plane, and of many workspaces at once", []string{"incident"}, ls,
		get)
}
