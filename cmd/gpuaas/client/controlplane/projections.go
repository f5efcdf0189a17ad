package controlplane

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// ProjectionsCommand returns the commands about projections.
func ProjectionsCommand(p *kit.Program) *cobra.Command {
	return kit.Group("projections", "Check and repair the rows that lists and timelines are read from", nil,
		projectionsStatus(p), projectionsVerify(p), projectionsRebuild(p))
}

// ProjectionTablesView is how the tables of the projections are printed.
var ProjectionTablesView = output.View[*readmodelv1.ProjectionTable]{
	Name: func(t *readmodelv1.ProjectionTable) string { return t.GetTable() },
	Columns: []output.Column[*readmodelv1.ProjectionTable]{
		{Title: "TABLE", Path: "table"},
		{Title: "ROWS", Moves: true, Of: func(_ *output.Printer, t *readmodelv1.ProjectionTable) string {
			if t.GetRows() < 0 {
				return "-"
			}
			return human.Number(t.GetRows())
		}},
		{Title: "SIZE", Moves: true, Of: func(_ *output.Printer, t *readmodelv1.ProjectionTable) string {
			return mebibytes(t.GetBytes())
		}},
	},
}

func projectionsStatus(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show how far the rows that are shown are behind the events, and their tables",
		Long: "Show the tables that lists and timelines are read from, with their rows as the database estimates them. " +
			"Under the list stand the position of\n" +
			"the last event that they have, how many wait to be applied, and since when the oldest of these waits. Events " +
			"that could not be applied are\n" +
			"parked: `gpuaas events parked` lists them. `gpuaas projections verify` compares the rows with the events.",
		Example: "  gpuaas projections status\n  gpuaas projections status -o json --jq '.events_behind'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Projections.GetProjections(ctx, &readmodelv1.GetProjectionsRequest{})
			if err != nil {
				return err
			}
			if s.Structured() {
				return output.Object(s.Printer, answer)
			}
			err = output.List(s.Printer, ProjectionTablesView, answer.GetTables(), "")
			if err != nil || s.Format == output.FormatName {
				return err
			}
			if err := s.Section("NAME", "VALUE"); err != nil {
				return err
			}
			rows := [][2]string{
				{"POSITION", human.Number(answer.GetPosition())},
				{"EVENTS BEHIND", human.Number(answer.GetEventsBehind())},
				{"BEHIND FOR", (time.Duration(answer.GetBehindSeconds()) * time.Second).String()},
				{"PARKED EVENTS", human.Number(answer.GetParkedEvents())},
			}
			if answer.GetParkedEvents() > 0 {
				rows = append(rows, [2]string{"NEXT ACTION", "look at them with `gpuaas events parked`, then replay or drop them"})
			}
			return s.Pairs(rows)
		}),
	}
}

// reportLines returns the lines about the result of a check or a rebuild.
func reportLines(r *readmodelv1.ProjectionReport) [][2]string {
	history := "whole"
	if r.GetCut() {
		history = "cut at the end of its term"
	}
	rows := [][2]string{{"EVENTS", human.Number(r.GetEvents())}, {"EVENT LOG", history}}
	if r.GetAnnounced() > 0 {
		rows = append(rows, [2]string{"ANNOUNCED ROWS", human.Number(r.GetAnnounced())})
	}
	if left := r.GetParked() + r.GetUnapplied(); left > 0 {
		rows = append(rows, [2]string{"LEFT OUT", human.Number(left)})
	}
	return rows
}

func projectionsVerify(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "verify", Short: "Compare the rows that are shown with what the events make; exit code 5 if they differ",
		Long: "Make the projections anew beside the real ones, from the events that stand, and compare both. Nothing is " +
			"changed. Once events were cut at\n" +
			"the end of their term, the rows that the rest of them tell of are compared (docs/retention.md). The request may " +
			"take ten minutes, unless\n" +
			"--request-timeout says otherwise.",
		Example: "  gpuaas projections verify", Args: kit.Args(),
		PreRun: p.Patient,
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Projections.VerifyProjections(ctx, &readmodelv1.VerifyProjectionsRequest{})
			if err != nil {
				return err
			}
			if s.Structured() {
				err = output.Object(s.Printer, answer)
			} else {
				rows := append([][2]string{{"EQUAL", human.YesNo(len(answer.GetDifferences()) == 0)}},
					reportLines(answer.GetReport())...)
				for _, d := range answer.GetDifferences() {
					rows = append(rows, [2]string{
						"TABLE " + d.GetTable(), fmt.Sprintf("%d missing, %d surplus, such as %s", d.GetMissing(), d.GetSurplus(),
							d.GetExample()),
					})
				}
				err = s.Pairs(rows)
			}
			if err != nil || len(answer.GetDifferences()) == 0 {
				return err
			}
			return &exit.Error{
				Code: exit.CodeRefused, Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
				Message: fmt.Sprintf("%d tables differ from what the events make", len(answer.GetDifferences())),
				Remedy:  "make them anew with `gpuaas projections rebuild`",
			}
		}),
	}
}

func projectionsRebuild(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "rebuild", Short: "Make the rows that are shown anew from the events",
		Long: "Make the projections anew and put them in the place of the old. Once events were cut at the end of their " +
			"term, the services announce their\n" +
			"live rows first, and what is over and of which no event tells any more stays as it is. Lists show the old rows " +
			"until the new ones are\n" +
			"complete, and nothing newer meanwhile. The request may take ten minutes, unless --request-timeout says otherwise.",
		Example: "  gpuaas projections rebuild", Args: kit.Args(),
		PreRun: p.Patient,
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Projections.RebuildProjections(ctx, &readmodelv1.RebuildProjectionsRequest{})
			if err != nil {
				return err
			}
			if s.Structured() {
				return output.Object(s.Printer, answer)
			}
			return s.Pairs(reportLines(answer.GetReport()))
		}),
	}
}
