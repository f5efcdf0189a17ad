package client

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
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

var brakeView = view[*recoveryv1.Brake]{
	name: brakeState,
	columns: []column[*recoveryv1.Brake]{
		{title: "STATE", of: func(_ *printer, b *recoveryv1.Brake) string { return brakeState(b) }},
		{title: "REASON", of: func(_ *printer, b *recoveryv1.Brake) string { return onlyIf(b.GetEngaged(), b.GetReason()) }},
		{title: "AFFECTED", of: func(_ *printer, b *recoveryv1.Brake) string {
			return onlyIf(b.GetFleet() > 0, fmt.Sprintf("%d of %d, %d are allowed", b.GetAffected(), b.GetFleet(), b.GetLimit()))
		}},
		{title: "SINCE", path: "since"},
		{title: "INCIDENT", path: "incident_id"},
	},
	more: []column[*recoveryv1.Brake]{
		{title: "RELEASED BY", path: "released_by"},
		{title: "RELEASED", path: "released_at"},
		{title: "RELEASED FOR", path: "release_reason"},
	},
}

func brakeState(b *recoveryv1.Brake) string {
	if b.GetEngaged() {
		return "engaged"
	}
	return "released"
}

func brakeCommand(p *Program) *cobra.Command {
	status := &cobra.Command{
		Use: "status", Aliases: []string{"get"}, Short: "Show whether automatic remedies are stopped, and why",
		Example: "  gpuaas brake status", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Incidents.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
			if err != nil {
				return err
			}
			return one(s.printer, brakeView, answer.GetBrake())
		}),
	}
	req := &readmodelv1.ReleaseBrakeRequest{}
	release := &cobra.Command{
		Use: "release", Short: "Let automatic remedies go on",
		Example: "  gpuaas brake release --reason 'the switch was replaced'", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Incidents.ReleaseBrake(ctx, req)
			if err != nil {
				return err
			}
			return one(s.printer, brakeView, answer.GetBrake(), with("pos", answer.GetPos()))
		}),
	}
	reasonFlag(release, &req.Reason, true)
	return group("brake", "The fleet brake: what stops automatic remedies when too much fails at once", nil, status,
		release)
}

// trouble is the part of the status beside the components: open incidents and the brake.
type trouble struct {
	incidents []*recoveryv1.Incident
	brake     *recoveryv1.Brake
}

// readTrouble reads the open incidents and the brake. It returns none if the person may not see them, or if the mesh does
// not have the methods.
func readTrouble(ctx context.Context, s *session) (trouble, error) {
	hidden := func(err error) bool {
		return fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) ||
			fault.Has(err, commonv1.Reason_REASON_UNIMPLEMENTED)
	}
	var t trouble
	open, err := s.client.Incidents.ListIncidents(ctx, &readmodelv1.ListIncidentsRequest{PageSize: 20})
	if err != nil {
		if hidden(err) {
			return t, nil
		}
		return t, fmt.Errorf("ask for incidents: %w", err)
	}
	t.incidents = open.GetItems()
	brake, err := s.client.Incidents.GetBrake(ctx, &readmodelv1.GetBrakeRequest{})
	if err != nil && !hidden(err) {
		return t, fmt.Errorf("ask for the brake: %w", err)
	}
	t.brake = brake.GetBrake()
	return t, nil
}

// members returns the fields that trouble adds to the status.
func (t trouble) members() []member {
	return []member{with("incidents", messages(t.incidents...)), with("brake", messages(t.brake)[0])}
}

// lines returns the lines that the status prints for it.
func (t trouble) lines() [][2]string {
	var out [][2]string
	if t.brake.GetEngaged() {
		out = append(out, [2]string{"BRAKE", "engaged: " + t.brake.GetReason() + " (`gpuaas brake release --reason TEXT`)"})
	}
	for _, i := range t.incidents {
		out = append(out, [2]string{
			"INCIDENT",
			strings.ToUpper(enumText(i.GetSeverity())) + " " + enumText(i.GetKind()) + ": " + i.GetSummary() + " (" +
				i.GetIncidentId() + ")",
		})
	}
	return out
}
