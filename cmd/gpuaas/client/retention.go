package client

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var retentionView = view[*readmodelv1.RetentionCut]{
	name: func(c *readmodelv1.RetentionCut) string { return c.GetService() + "/" + c.GetCut() },
	columns: []column[*readmodelv1.RetentionCut]{
		{title: "SERVICE", path: "service"},
		{title: "ROWS", path: "cut"},
		{title: "TERM", of: func(_ *printer, c *readmodelv1.RetentionCut) string { return spelledTerm(c.GetTermSeconds()) }},
		{title: "CUT", path: "rows"},
		{title: "OLDEST", drop: 2, moves: true, path: "oldest_at"},
		{title: "LAST WALK", drop: 1, moves: true, path: "done_at"},
		{title: "FAILURE", text: true, path: "failure"},
		{title: "POLICY KEY", path: "policy_key", wide: true},
		{title: "CUT LAST", path: "last_rows", wide: true},
		{title: "BEGAN", path: "began_at", wide: true},
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
		{"OLDEST PARKED EVENT", spelledMoment(h.GetOldestParkedAt())},
		{"RETENTION LAG", (time.Duration(h.GetRetentionLagSeconds()) * time.Second).String()},
	}
}

func retentionCommand(p *Program) *cobra.Command {
	return group("retention", "How long history is kept, and what of it was cut", nil, retentionStatus(p))
}

func retentionStatus(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the terms of history, what was cut at their end, and the size of the event log",
		Long: "Show each kind of rows that has a term: the term by its policy key, the rows cut so far, the oldest row that is left, and the last walk\n" +
			"that came to its end (docs/retention.md). Under the list stand the size of the event log, the oldest event that is parked, which keeps\n" +
			"all events behind it, and the lag: how long ago the slowest of the walks came to its end.",
		Example: "  gpuaas retention status\n  gpuaas retention status -o json --jq '.lag_seconds'",
		Args:    args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Retention.GetRetention(ctx, &readmodelv1.GetRetentionRequest{})
			if err != nil {
				return err
			}
			if s.structured() {
				return object(s.printer, answer)
			}
			if err := list(s.printer, retentionView, answer.GetCuts(), ""); err != nil || s.format == formatName {
				return err
			}
			if err := s.section("NAME", "VALUE"); err != nil {
				return err
			}
			rows := [][2]string{
				{"EVENT LOG", mebibytes(answer.GetEventsBytes()) + " of " + mebibytes(answer.GetDatabaseBytes())},
				{"OLDEST PARKED EVENT", spelledMoment(answer.GetOldestParkedAt())},
				{"LAG", (time.Duration(answer.GetLagSeconds()) * time.Second).String()},
			}
			if held := answer.GetHeld(); held != "" {
				rows = append(rows, [2]string{"HELD", held}, [2]string{"NEXT ACTION", answer.GetNextAction()})
			}
			return s.pairs(rows)
		}),
	}
}
