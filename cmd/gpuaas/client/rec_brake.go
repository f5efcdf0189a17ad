package client

import (
	"context"
	"fmt"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/spf13/cobra"
)

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
