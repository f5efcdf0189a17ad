package client

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func projectionsCommand(p *Program) *cobra.Command {
	return group("projections", "Check and repair the rows that lists and timelines are read from", nil,
		projectionsVerify(p), projectionsRebuild(p))
}

// reportLines returns the lines about the result of a check or a rebuild.
func reportLines(r *readmodelv1.ProjectionReport) [][2]string {
	history := "whole"
	if r.GetCut() {
		history = "cut at the end of its term"
	}
	rows := [][2]string{{"EVENTS", number(r.GetEvents())}, {"EVENT LOG", history}}
	if r.GetAnnounced() > 0 {
		rows = append(rows, [2]string{"ANNOUNCED ROWS", number(r.GetAnnounced())})
	}
	if left := r.GetParked() + r.GetUnapplied(); left > 0 {
		rows = append(rows, [2]string{"LEFT OUT", number(left)})
	}
	return rows
}

func projectionsVerify(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "verify", Short: "Compare the rows that are shown with what the events make; exit code 5 if they differ",
		Long: "Make the projections anew beside the real ones, from the events that stand, and compare both. Nothing is changed. Once events were cut at\n" +
			"the end of their term, the rows that the rest of them tell of are compared (docs/retention.md). The request may take ten minutes, unless\n" +
			"--request-timeout says otherwise.",
		Example: "  gpuaas projections verify", Args: args(),
		PreRun: p.patient,
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Projections.VerifyProjections(ctx, &readmodelv1.VerifyProjectionsRequest{})
			if err != nil {
				return err
			}
			if s.structured() {
				err = object(s.printer, answer)
			} else {
				rows := append([][2]string{{"EQUAL", yesNo(len(answer.GetDifferences()) == 0)}}, reportLines(answer.GetReport())...)
				for _, d := range answer.GetDifferences() {
					rows = append(rows, [2]string{
						"TABLE " + d.GetTable(), fmt.Sprintf("%d missing, %d surplus, such as %s", d.GetMissing(), d.GetSurplus(),
							d.GetExample()),
					})
				}
				err = s.pairs(rows)
			}
			if err != nil || len(answer.GetDifferences()) == 0 {
				return err
			}
			return &exitError{
				code: ExitRefused, reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
				message: fmt.Sprintf("%d tables differ from what the events make", len(answer.GetDifferences())),
				remedy:  "make them anew with `gpuaas projections rebuild`",
			}
		}),
	}
}

func projectionsRebuild(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "rebuild", Short: "Make the rows that are shown anew from the events",
		Long: "Make the projections anew and put them in the place of the old. Once events were cut at the end of their term, the services announce their\n" +
			"live rows first, and what is over and of which no event tells any more stays as it is. Lists show the old rows until the new ones are\n" +
			"complete, and nothing newer meanwhile. The request may take ten minutes, unless --request-timeout says otherwise.",
		Example: "  gpuaas projections rebuild", Args: args(),
		PreRun: p.patient,
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Projections.RebuildProjections(ctx, &readmodelv1.RebuildProjectionsRequest{})
			if err != nil {
				return err
			}
			if s.structured() {
				return object(s.printer, answer)
			}
			return s.pairs(reportLines(answer.GetReport()))
		}),
	}
}
