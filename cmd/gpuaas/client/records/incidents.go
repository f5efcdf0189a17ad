package records

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// IncidentView is how incidents are printed.
var IncidentView = output.View[*recoveryv1.Incident]{
	Name: (*recoveryv1.Incident).GetIncidentId,
	Columns: []output.Column[*recoveryv1.Incident]{
		{Title: "INCIDENT", ID: true, Path: "incident_id"},
		{Title: "KIND", Path: "kind"},
		{Title: "SEVERITY", Path: "severity", As: output.Upper},
		{Title: "SUMMARY", Text: true, Path: "summary"},
		{Title: "WORKSPACES", Drop: 2, Path: "workspace_ids", As: output.Length},
		{Title: "SINCE", Drop: 1, Moves: true, Path: "opened_at"},
		{Title: "CLOSED", Drop: 3, Moves: true, Path: "closed_at"},
		{Title: "NEXT ACTION", Path: "next_action", Wide: true},
		{Title: "OWNER", Path: "owner_layer", Wide: true},
		{Title: "STEP", Path: "step", Wide: true},
		{Title: "ERROR", Path: "error_code", Wide: true},
	},
	More: []output.Column[*recoveryv1.Incident]{
		{Title: "LAST SEEN", Path: "last_seen_at"},
		{Title: "SEEN", Path: "count", As: output.NonZero},
		{Title: "CLOSED BY", Path: "closed_by"},
		{Title: "CLOSED FOR", Text: true, Path: "close_reason"},
		{Title: "TENANTS", Path: "tenant_ids", As: output.Lines},
		{Title: "WORKSPACE", Path: "workspaces workspace_ids", As: output.NameOrID},
		{Title: "NODES", Path: "node_names node_ids", As: output.NameOrID},
	},
}

// IncidentsCommand returns the commands about incidents.
func IncidentsCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListIncidentsRequest{}
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List open incidents",
		Example: "  gpuaas incidents list\n  gpuaas incidents list --all", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*recoveryv1.Incident]{
				View:  IncidentView,
				Fetch: kit.Method(s.Client.Incidents.ListIncidents, req),
			})
		}),
	}
	page.Flags(ls)
	ls.Flags().BoolVar(&req.IncludeClosed, "all", false, "the closed ones as well")
	get := &cobra.Command{
		Use: "get INCIDENT", Short: "Show one incident with the recoveries that it speaks of",
		Example: "  gpuaas incidents get 0197c0de-0000-7000-8000-000000000001", Args: kit.Args("INCIDENT"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			id, err := s.ID(ctx, kit.KindIncident, args[0])
			if err != nil {
				return err
			}
			answer, err := s.Client.Incidents.GetIncident(ctx, &readmodelv1.GetIncidentRequest{IncidentId: id})
			if err != nil {
				return err
			}
			if s.Structured() {
				return output.Object(s.Printer, answer.GetIncident(),
					output.With("recoveries", output.Messages(answer.GetRecoveries()...)),
					output.With("workspaces_touched", answer.GetWorkspacesTouched()),
					output.With("cordons_waiting", answer.GetCordonsWaiting()))
			}
			err = output.One(s.Printer, IncidentView, answer.GetIncident())
			return output.Under(s.Printer, err, RecoveryView.Columns, answer.GetRecoveries())
		}),
	}
	return kit.Group("incidents", "Failures of the control plane, and of many workspaces at once", []string{"incident"},
		ls, get, closeCommand(p))
}

// closeCommand returns the command by which a person closes an incident.
func closeCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.CloseIncidentRequest{}
	cmd := &cobra.Command{
		Use: "close INCIDENT --reason TEXT", Short: "Close an incident that a person has judged",
		Long: "Close an incident whose cause a person has judged, although its evidence stands: of many nodes with the " +
			"same reason (fleet_drift), of nodes that are in a state for long (state_overdue), or, with the security role, " +
			"of an identity with a second holder (identity_suspected). No other is opened for its nodes while they stay as " +
			"they are; one of many nodes opens again if many begin to have the reason at once, and after one about " +
			"identities security gets an identity_suspected for the nodes on hold. It changes nothing about the nodes. " +
			"Repeated by the same person it changes nothing and shows the incident. An incident of any other kind ends with " +
			"its evidence, or by the verb that the refusal names.",
		Example: "  gpuaas incidents close 0197c0de-0000-7000-8000-000000000001 --reason 'the rack is being moved'",
		Args:    kit.Args("INCIDENT"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			if req.IncidentId, err = s.ID(ctx, kit.KindIncident, args[0]); err != nil {
				return err
			}
			answer, err := s.Client.Incidents.CloseIncident(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, IncidentView, answer.GetIncident(), output.With("pos", answer.GetPos()))
		}),
	}
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}
