package workspaces

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/showable"
)

// TimelineView is how the attempts at steps are printed.
var TimelineView = output.View[*readmodelv1.TimelineItem]{
	Name: (*readmodelv1.TimelineItem).GetName,
	Columns: []output.Column[*readmodelv1.TimelineItem]{
		{Title: "STEP", Path: "step"},
		{Title: "NAME", Path: "name direction", As: output.Undone},
		{Title: "DIRECTION", Path: "direction", Wide: true},
		{Title: "ATTEMPT", Drop: 1, Path: "attempt", As: output.NonZero},
		{Title: "STATE", Of: func(_ *output.Printer, i *readmodelv1.TimelineItem) string {
			return cmp.Or(human.Enum(i.GetState()), "not begun") + human.OnlyIf(i.GetStalled(), " (stalled)")
		}},
		{Title: "STAGE", Path: "stage", Wide: true},
		{Title: "STARTED", Drop: 4, Moves: true, Path: "started_at"},
		{Title: "DURATION", Drop: 2, Moves: true, Path: "duration_seconds"},
		{Title: "HEARTBEAT", Drop: 5, Moves: true, Of: func(_ *output.Printer, i *readmodelv1.TimelineItem) string {
			return human.OnlyIf(i.GetHeartbeatAgeSeconds() > 0, human.Seconds(i.GetHeartbeatAgeSeconds())+" ago")
		}},
		{Title: "PROGRESS", Drop: 3, Path: "progress"},
		{Title: "ERROR", Drop: 6, Below: true, Of: func(_ *output.Printer, i *readmodelv1.TimelineItem) string {
			layer := human.Enum(i.GetErrorLayer())
			return human.OnlyIf(layer != "" && i.GetError() != "", "["+layer+"] ") + cmp.Or(i.GetError(),
				i.GetWhyWaiting()) + human.OnlyIf(i.GetCause() != "", ": "+i.GetCause())
		}},
		{Title: "CAUSE", Path: "likely_cause", Wide: true},
		{Title: "ADVICE", Path: "advice", Wide: true},
		{Title: "ROUND", Path: "round", As: output.NonZero, Wide: true},
		{Title: "RUN", Path: "run_id", Wide: true},
	},
}

// RunView lists the runs of a workspace under the timeline of one.
var RunView = output.View[*readmodelv1.RunBrief]{
	Name: (*readmodelv1.RunBrief).GetRunId,
	Columns: []output.Column[*readmodelv1.RunBrief]{
		{Title: "RUN", ID: true, Path: "run_id"},
		{Title: "KIND", Path: "kind", As: output.Dashed},
		{Title: "STATE", Path: "state"},
		{Title: "STARTED", Drop: 3, Moves: true, Path: "started_at"},
		{Title: "ENDED", Drop: 4, Moves: true, Path: "ended_at"},
		{Title: "FAILED STEP", Drop: 1, Path: "failed_step"},
		{Title: "SHOWN", Drop: 2, Of: func(_ *output.Printer, r *readmodelv1.RunBrief) string {
			return human.OnlyIf(r.GetShown(), "above")
		}},
		{Title: "ERROR", Wide: true, Path: "error_layer error", As: output.Layered},
	},
}

func timelineCommand(p *kit.Program) *cobra.Command {
	req := &readmodelv1.GetTimelineRequest{}
	cmd := &cobra.Command{
		Use: "timeline WS", Short: "Show every attempt at every step of a run, as recorded, and which runs there were",
		Example: "  gpuaas workspaces timeline acme/demo2\n  gpuaas workspaces timeline acme/demo2 --run " +
			"0192f0c1-0000-7000-8000-000000000003 -o wide", Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Workspace = args[0]
			if req.GetRunId() != "" {
				var err error
				if req.RunId, err = s.ID(ctx, kit.KindRun, req.GetRunId()); err != nil {
					return err
				}
			}
			answer, err := s.Query.GetTimeline(ctx, req)
			if err != nil {
				return err
			}
			err = output.List(s.Printer, TimelineView, answer.GetItems(), "",
				output.With("workspace", output.Messages(answer.GetWorkspace())[0]),
				output.With("runs", output.Messages(answer.GetRuns()...)),
				output.With("history", output.Messages(answer.GetHistory()...)))
			if err != nil || s.Printer.Structured() || s.Printer.Format == output.FormatName {
				return err
			}
			if err := lastOutputs(s, answer.GetItems()); err != nil || len(answer.GetHistory()) < 2 {
				return err
			}
			return output.Under(s.Printer, nil, RunView.Columns, answer.GetHistory())
		}),
	}
	cmd.Flags().StringVar(&req.RunId, "run", "",
		"show this `run` instead of the newest: one of those that the timeline lists")
	return cmd
}

// lastOutputs prints, under a timeline, the last output of the workloads whose failures it shows, and what to do about
// them.
func lastOutputs(s *kit.Session, items []*readmodelv1.TimelineItem) error {
	for _, i := range items {
		if i.GetLastOutput() == "" {
			continue
		}
		title := fmt.Sprintf("last output at step %s (%s), attempt %d:", i.GetStep(), human.Clean(i.GetName()),
			i.GetAttempt())
		for _, text := range append([]string{"", title}, indented(i.GetLastOutput())...) {
			if err := s.Line(text); err != nil {
				return err
			}
		}
	}
	return nil
}

// indented returns the lines of a text, cleaned and indented by two spaces.
func indented(text string) []string {
	var out []string
	for line := range strings.Lines(showable.Clean([]byte(text))) {
		out = append(out, "  "+strings.TrimRight(line, "\n"))
	}
	return out
}
