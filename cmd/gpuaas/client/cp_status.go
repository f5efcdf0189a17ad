package client

import (
	"context"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/spf13/cobra"
)

func statusCommand(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the state of each part of the mesh",
		Example: "  gpuaas status\n  gpuaas status -o json --jq '.components[] | select(.ok | not).name'", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			wrong, err := readTrouble(ctx, s)
			if err != nil {
				return err
			}
			if s.structured() {
				return object(s.printer, answer, wrong.members()...)
			}
			if s.format == formatName {
				for _, c := range answer.GetComponents() {
					if err := s.line(clean(c.GetName())); err != nil {
						return err
					}
				}
				return nil
			}
			if err := table(s.printer, componentColumns, answer.GetComponents()); err != nil {
				return err
			}
			if err := s.section("NAME", "VALUE"); err != nil {
				return err
			}
			return s.pairs(slices.Concat(rollbackLines(answer.GetComponents()), [][2]string{
				{"NODES", fmt.Sprintf("%d, %d connected", answer.GetNodes(), answer.GetNodesConnected())},
				{"WORKSPACES", fmt.Sprintf("%d, %d active", answer.GetWorkspaces(), answer.GetWorkspacesActive())},
				{"LIVE RUNS", number(answer.GetLiveRuns())},
				{"FINDINGS", fmt.Sprintf("%d P0, %d P1, %d P2 open", answer.GetFindingsP0(), answer.GetFindingsP1(),
					answer.GetFindingsP2())},
				{"EVENTS", fmt.Sprintf("at %d, %d behind, %d parked", answer.GetPosition(), answer.GetEventsBehind(),
					answer.GetParkedEvents())},
				{"ERA", number(answer.GetEra())},
				{"VERSION", answer.GetVersion()},
			}, historyLines(answer.GetHistory()), wrong.lines()))
		}),
	}
}

var componentColumns = []column[*readmodelv1.ComponentStatus]{
	{title: "PART", path: "name"},
	{title: "STATE", of: func(_ *printer, c *readmodelv1.ComponentStatus) string {
		switch {
		case c.GetState() != commonv1.PartState_PART_STATE_UNSPECIFIED:
			return names.Of(c.GetState())
		case c.GetOk(): // an older server
			return "ok"
		default:
			return "down"
		}
	}},
	{title: "SEVERITY", drop: 1, of: func(_ *printer, c *readmodelv1.ComponentStatus) string {
		if c.GetSeverity() == commonv1.Severity_SEVERITY_UNSPECIFIED {
			return ""
		}
		return names.Of(c.GetSeverity())
	}},
	{title: "SINCE", drop: 3, moves: true, path: "since"},
	{title: "DETAIL", text: true, path: "detail"},
	{title: "OBSERVED", moves: true, path: "observed_at", wide: true},
	{title: "REASON", path: "reason", wide: true},
	{title: "NEXT ACTION", drop: 2, text: true, path: "next_action"},
}
