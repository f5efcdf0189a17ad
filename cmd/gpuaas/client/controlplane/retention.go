package controlplane

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// RetentionView is how the deletion of history is printed.
var RetentionView = output.View[*readmodelv1.RetentionCut]{
	Name: func(c *readmodelv1.RetentionCut) string { return c.GetService() + "/" + c.GetCut() },
	Columns: []output.Column[*readmodelv1.RetentionCut]{
		{Title: "SERVICE", Path: "service"},
		{Title: "ROWS", Path: "cut"},
		{Title: "TERM", Of: func(_ *output.Printer, c *readmodelv1.RetentionCut) string {
			return spelledTerm(c.GetTermSeconds())
		}},
		{Title: "CUT", Path: "rows"},
		{Title: "OLDEST", Drop: 2, Moves: true, Path: "oldest_at"},
		{Title: "LAST WALK", Drop: 1, Moves: true, Path: "done_at"},
		{Title: "FAILURE", Text: true, Path: "failure"},
		{Title: "POLICY KEY", Path: "policy_key", Wide: true},
		{Title: "CUT LAST", Path: "last_rows", Wide: true},
		{Title: "BEGAN", Path: "began_at", Wide: true},
	},
}

// spelledTerm returns a number of seconds as text, in days if it is a whole number of days.
func spelledTerm(seconds int64) string {
	const day = 24 * 60 * 60
	if seconds > 0 && seconds%day == 0 {
		return fmt.Sprintf("%d d", seconds/day)
	}
	return (time.Duration(seconds) * time.Second).String()
}

// mebibytes returns a size in bytes as text in MiB.
func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// historyLines returns the lines of the status about history; none if the server is older, or for people of a tenant.
func historyLines(h *readmodelv1.HistoryStatus) [][2]string {
	if h == nil {
		return nil
	}
	database := mebibytes(h.GetDatabaseBytes())
	if limit := h.GetLimitBytes(); limit > 0 {
		database += " of " + mebibytes(limit)
	}
	if perDay := h.GetBytesPerDay(); perDay > 0 {
		database += ", " + mebibytes(perDay) + " more a day"
		if limit := h.GetLimitBytes(); limit > h.GetDatabaseBytes() {
			database += fmt.Sprintf(", full in %.0f days", float64(limit-h.GetDatabaseBytes())/float64(perDay))
		}
	}
	return [][2]string{
		{"DATABASE", database},
		{"EVENT LOG", mebibytes(h.GetEventsBytes())},
		{"OLDEST PARKED EVENT", human.Moment(h.GetOldestParkedAt())},
		{"RETENTION LAG", (time.Duration(h.GetRetentionLagSeconds()) * time.Second).String()},
	}
}

// RetentionCommand returns the commands about the retention of history.
func RetentionCommand(p *kit.Program) *cobra.Command {
	return kit.Group("retention", "How long history is kept, and what of it was cut", nil, retentionStatus(p))
}

func retentionStatus(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the terms of history, what was cut at their end, and the size of the event log",
		Long: "Show each kind of rows that has a term: the term by its policy key, the rows cut so far, the oldest row " +
			"that is left, and the last walk\n" +
			"that came to its end (docs/retention.md). Under the list stand the size of the event log, the oldest event that " +
			"is parked, which keeps\n" +
			"all events behind it, and the lag: how long ago the slowest of the walks came to its end.",
		Example: "  gpuaas retention status\n  gpuaas retention status -o json --jq '.lag_seconds'",
		Args:    kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Retention.GetRetention(ctx, &readmodelv1.GetRetentionRequest{})
			if err != nil {
				return err
			}
			if s.Structured() {
				return output.Object(s.Printer, answer)
			}
			if err := output.List(s.Printer, RetentionView, answer.GetCuts(), ""); err != nil || s.Format == output.FormatName {
				return err
			}
			if err := s.Section("NAME", "VALUE"); err != nil {
				return err
			}
			rows := [][2]string{
				{"EVENT LOG", mebibytes(answer.GetEventsBytes()) + " of " + mebibytes(answer.GetDatabaseBytes())},
				{"OLDEST PARKED EVENT", human.Moment(answer.GetOldestParkedAt())},
				{"LAG", (time.Duration(answer.GetLagSeconds()) * time.Second).String()},
			}
			if held := answer.GetHeld(); held != "" {
				rows = append(rows, [2]string{"HELD", held}, [2]string{"NEXT ACTION", answer.GetNextAction()})
			}
			return s.Pairs(rows)
		}),
	}
}
