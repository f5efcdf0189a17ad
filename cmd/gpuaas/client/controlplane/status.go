package controlplane

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/records"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// StatusCommand returns the command that prints the state of each part of the mesh.
func StatusCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the state of each part of the mesh",
		Example: "  gpuaas status\n  gpuaas status -o json --jq '.components[] | select(.ok | not).name'", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			wrong, err := records.ReadTrouble(ctx, s)
			if err != nil {
				return err
			}
			if s.Structured() {
				return output.Object(s.Printer, answer, wrong.Members()...)
			}
			if s.Format == output.FormatName {
				return output.Names(s.Printer, answer.GetComponents(), (*readmodelv1.ComponentStatus).GetName)
			}
			if err := output.Table(s.Printer, ComponentColumns, answer.GetComponents()); err != nil {
				return err
			}
			if err := s.Section("NAME", "VALUE"); err != nil {
				return err
			}
			return s.Pairs(slices.Concat(rollbackLines(answer.GetComponents()), countLines(answer),
				historyLines(answer.GetHistory()), wrong.Lines()))
		}),
	}
}

// countLines returns the lines of what is counted. A person of a tenant is sent the counts of the tenant alone, so that
// the figures of the whole mesh are zero, the position of its events too, and are left out.
func countLines(answer *readmodelv1.GetStatusResponse) [][2]string {
	own := [][2]string{
		{"WORKSPACES", fmt.Sprintf("%d, %d active", answer.GetWorkspaces(), answer.GetWorkspacesActive())},
		{"LIVE RUNS", human.Number(answer.GetLiveRuns())},
	}
	version := [2]string{"VERSION", answer.GetVersion()}
	if answer.GetPosition() == 0 && answer.GetNodes() == 0 {
		return append(own, version)
	}
	return slices.Concat([][2]string{
		{"NODES", fmt.Sprintf("%d, %d connected", answer.GetNodes(), answer.GetNodesConnected())},
	}, own, [][2]string{
		{"FINDINGS", fmt.Sprintf("%d P0, %d P1, %d P2 open", answer.GetFindingsP0(), answer.GetFindingsP1(),
			answer.GetFindingsP2())},
		{"EVENTS", fmt.Sprintf("at %d, %d behind, %d parked", answer.GetPosition(), answer.GetEventsBehind(),
			answer.GetParkedEvents())},
		{"ERA", human.Number(answer.GetEra())},
		version,
	})
}

// ComponentColumns are the columns of the parts of the mesh.
var ComponentColumns = []output.Column[*readmodelv1.ComponentStatus]{
	{Title: "PART", Path: "name"},
	{Title: "STATE", Of: func(_ *output.Printer, c *readmodelv1.ComponentStatus) string {
		switch {
		case c.GetState() != commonv1.PartState_PART_STATE_UNSPECIFIED:
			return names.Of(c.GetState())
		case c.GetOk(): // an older server
			return "ok"
		default:
			return "down"
		}
	}},
	{Title: "SEVERITY", Drop: 1, Of: func(_ *output.Printer, c *readmodelv1.ComponentStatus) string {
		if c.GetSeverity() == commonv1.Severity_SEVERITY_UNSPECIFIED {
			return ""
		}
		return names.Of(c.GetSeverity())
	}},
	{Title: "SINCE", Drop: 3, Moves: true, Path: "since"},
	{Title: "DETAIL", Text: true, Path: "detail"},
	{Title: "OBSERVED", Moves: true, Path: "observed_at", Wide: true},
	{Title: "REASON", Path: "reason", Wide: true},
	{Title: "NEXT ACTION", Drop: 2, Text: true, Path: "next_action"},
}
