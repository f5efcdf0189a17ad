package records

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// BrakeView is how the fleet brake is printed.
var BrakeView = output.View[*recoveryv1.Brake]{
	Name: brakeState,
	Columns: []output.Column[*recoveryv1.Brake]{
		{Title: "STATE", Of: func(_ *output.Printer, b *recoveryv1.Brake) string { return brakeState(b) }},
		{Title: "REASON", Of: func(_ *output.Printer, b *recoveryv1.Brake) string {
			return human.OnlyIf(b.GetEngaged(), b.GetReason())
		}},
		{Title: "AFFECTED", Of: func(_ *output.Printer, b *recoveryv1.Brake) string {
			return human.OnlyIf(b.GetFleet() > 0,
				fmt.Sprintf("%d of %d, %d are allowed", b.GetAffected(), b.GetFleet(), b.GetLimit()))
		}},
		{Title: "SINCE", Path: "since"},
		{Title: "INCIDENT", Path: "incident_id"},
	},
	More: []output.Column[*recoveryv1.Brake]{
		{Title: "RELEASED BY", Path: "released_by"},
		{Title: "RELEASED", Path: "released_at"},
		{Title: "RELEASED FOR", Path: "release_reason"},
	},
}

func brakeState(b *recoveryv1.Brake) string {
	if b.GetEngaged() {
		return "engaged"
	}
	return "released"
}

// BrakeCommand returns the commands about the fleet brake.
func BrakeCommand(p *kit.Program) *cobra.Command {
	status := &cobra.Command{
		Use: "status", Aliases: []string{"get"}, Short: "Show whether automatic remedies are stopped, and why",
		Example: "  gpuaas brake status", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Get(ctx, s, BrakeView, s.Client.Incidents.GetBrake, &readmodelv1.GetBrakeRequest{},
				(*readmodelv1.GetBrakeResponse).GetBrake)
		}),
	}
	req := &readmodelv1.ReleaseBrakeRequest{}
	release := &cobra.Command{
		Use: "release", Short: "Let automatic remedies go on",
		Example: "  gpuaas brake release --reason 'the switch was replaced'", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Incidents.ReleaseBrake(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, BrakeView, answer.GetBrake(), output.With("pos", answer.GetPos()))
		}),
	}
	kit.ReasonFlag(release, &req.Reason, true)
	return kit.Group("brake", "The fleet brake: what stops automatic remedies when too much fails at once", nil, status,
		release)
}
