package client

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/showable"
	"github.com/spf13/cobra"
)

var timelineView = view[*readmodelv1.TimelineItem]{
	name: (*readmodelv1.TimelineItem).GetName,
	columns: []column[*readmodelv1.TimelineItem]{
		{title: "STEP", path: "step"},
		{title: "NAME", path: "name direction", as: undone},
		{title: "DIRECTION", path: "direction", wide: true},
		{title: "ATTEMPT", drop: 1, path: "attempt", as: nonzero},
		{title: "STATE", of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			return cmp.Or(enumText(i.GetState()), "not begun") + onlyIf(i.GetStalled(), " (stalled)")
		}},
		{title: "STARTED", drop: 4, moves: true, path: "started_at"},
		{title: "DURATION", drop: 2, moves: true, path: "duration_seconds"},
		{title: "HEARTBEAT", drop: 5, moves: true, of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			return onlyIf(i.GetHeartbeatAgeSeconds() > 0, seconds(i.GetHeartbeatAgeSeconds())+" ago")
		}},
		{title: "PROGRESS", drop: 3, path: "progress"},
		{title: "ERROR", drop: 6, below: true, of: func(_ *printer, i *readmodelv1.TimelineItem) string {
			layer := enumText(i.GetErrorLayer())
			return onlyIf(layer != "" && i.GetError() != "", "["+layer+"] ") + cmp.Or(i.GetError(),
				i.GetWhyWaiting()) + onlyIf(i.GetCause() != "", ": "+i.GetCause())
		}},
		{title: "CAUSE", path: "likely_cause", wide: true},
		{title: "ADVICE", path: "advice", wide: true},
		{title: "ROUND", path: "round", as: nonzero, wide: true},
		{title: "RUN", path: "run_id", wide: true},
	},
}

// runView lists the runs of a workspace under the timeline of one.
var runView = view[*readmodelv1.RunBrief]{
	name: (*readmodelv1.RunBrief).GetRunId,
	columns: []column[*readmodelv1.RunBrief]{
		{title: "RUN", id: true, path: "run_id"},
		{title: "KIND", path: "kind", as: dashed},
		{title: "STATE", path: "state"},
		{title: "STARTED", drop: 3, moves: true, path: "started_at"},
		{title: "ENDED", drop: 4, moves: true, path: "ended_at"},
		{title: "FAILED STEP", drop: 1, path: "failed_step"},
		{title: "SHOWN", drop: 2, of: func(_ *printer, r *readmodelv1.RunBrief) string { return onlyIf(r.GetShown(), "above") }},
		{title: "ERROR", wide: true, path: "error_layer error", as: layered},
	},
}

func workspacesTimeline(p *Program) *cobra.Command {
	req := &readmodelv1.GetTimelineRequest{}
	cmd := &cobra.Command{
		Use: "timeline WS", Short: "Show every attempt at every step of a run, as recorded, and which runs there were",
		Example: "  gpuaas workspaces timeline acme/demo2\n  gpuaas workspaces timeline acme/demo2 --run 0192f0c1-0000-7000-8000-000000000003 -o wide", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Workspace = args[0]
			if req.GetRunId() != "" {
				id, err := s.id(ctx, kindRun, req.GetRunId())
				if err != nil {
					return err
				}
				req.RunId = id
			}
			answer, err := s.query.GetTimeline(ctx, req)
			if err != nil {
				return err
			}
			err = list(s.printer, timelineView, answer.GetItems(), "", with("workspace", messages(answer.GetWorkspace())[0]),
				with("runs", messages(answer.GetRuns()...)), with("history", messages(answer.GetHistory()...)))
			if err != nil || s.printer.structured() || s.printer.format == formatName {
				return err
			}
			if err := lastOutputs(s, answer.GetItems()); err != nil || len(answer.GetHistory()) < 2 {
				return err
			}
			return under(s.printer, runView.columns, answer.GetHistory())
		}),
	}
	cmd.Flags().StringVar(&req.RunId, "run", "",
		"show this `run` instead of the newest: one of those that the timeline lists")
	return cmd
}

// lastOutputs prints, under a timeline, the last output of the workloads whose failures it shows, and what to do about
// them.
func lastOutputs(s *session, items []*readmodelv1.TimelineItem) error {
	for _, i := range items {
		if i.GetLastOutput() == "" {
			continue
		}
		title := fmt.Sprintf("last output at step %s (%s), attempt %d:", i.GetStep(), clean(i.GetName()), i.GetAttempt())
		for _, text := range append([]string{"", title}, indented(i.GetLastOutput())...) {
			if err := s.line(text); err != nil {
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
