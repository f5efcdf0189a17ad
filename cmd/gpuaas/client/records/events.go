package records

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// EventView is how events are printed.
var EventView = output.View[*readmodelv1.EventRow]{
	Name: func(e *readmodelv1.EventRow) string { return human.Number(e.GetPosition()) },
	Columns: []output.Column[*readmodelv1.EventRow]{
		{Title: "POSITION", Path: "position"},
		{Title: "AT", Moves: true, Path: "at"},
		{Title: "TYPE", Path: "kind"},
		{Title: "OBJECT", ID: true, Path: "aggregate_id"},
		{Title: "VERSION", Drop: 1, Path: "aggregate_version"},
		{Title: "BODY", Below: true, Of: func(_ *output.Printer, e *readmodelv1.EventRow) string { return eventBody(e, "") }},
		{Title: "SOURCE", Path: "source", Wide: true},
		{Title: "WORKSPACE", Path: "workspace_id", Wide: true},
		{Title: "NODE", Path: "node_id", Wide: true},
		{Title: "RUN", Path: "workflow_id", Wide: true},
		{Title: "TASK", Path: "task_id", Wide: true},
		{Title: "CORRELATION", Path: "correlation_id", Wide: true},
	},
}

// eventBody returns the body of an event as JSON, with its keys in order.
func eventBody(e *readmodelv1.EventRow, indent string) string {
	if e.GetWithheld() != "" {
		return "withheld: " + e.GetWithheld()
	}
	var b strings.Builder
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", indent)
	if err := encoder.Encode(e.GetBody().AsMap()); err != nil {
		return err.Error()
	}
	return strings.TrimSpace(b.String())
}

// EventsCommand returns the commands about events and their consumers.
func EventsCommand(p *kit.Program) *cobra.Command {
	return kit.Group("events", "The event log: what services wrote, with their messages, and who reads it", nil,
		eventsShow(p), eventsConsumers(p), eventsForget(p), eventsParked(p), eventsReplay(p), eventsDrop(p))
}

func eventsShow(p *kit.Program) *cobra.Command {
	var page kit.Paging
	var since int64
	req := &readmodelv1.ListEventsRequest{}
	cmd := &cobra.Command{
		Use: "show [POSITION]", Short: "Show the event at a position, or those from one on, with their messages as JSON",
		Long: "Show the event at a position of the log, or with --since those from a position on, oldest first. What " +
			"stands in an event as bytes is\n" +
			"printed as JSON. What an earlier build stored as JSON is withheld: it may have values of environments. It is " +
			"for operators.",
		Example: "  gpuaas events show 1099511627800\n  gpuaas events show --since 1099511627776 --type run.changed " +
			"--limit 20\n" +
			"  gpuaas events show --since 1099511627776 -o json --jq '.items[].body'",
		Args: kit.ArgsFrom(0, "POSITION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			switch {
			case len(args) == 0 && since <= 0:
				return exit.Usage(errors.New("events show: name a position, or give --since with 1 or more"))
			case len(args) == 1 && (since != 0 || req.GetKind() != "" || page.Token != "" || page.Limit != 0):
				return exit.Usage(errors.New("events show POSITION: it goes without --since, --type, --limit and --page-token"))
			case len(args) == 1:
				position, err := strconv.ParseInt(args[0], 10, 64)
				if err != nil || position < 1 {
					return exit.Usage(fmt.Errorf("position %q: it is a number of 1 or more", args[0]))
				}
				answer, err := s.Client.Events.ListEvents(ctx, &readmodelv1.ListEventsRequest{Position: position})
				if err != nil {
					return err
				}
				return printEvents(s, answer.GetItems())
			}
			req.Since = since
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.EventRow]{
				View:  EventView,
				Fetch: kit.Method(s.Client.Events.ListEvents, req),
			})
		}),
	}
	cmd.Flags().IntVar(&page.Limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&page.Token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	cmd.Flags().Int64Var(&since, "since", 0, "the position of the first event")
	cmd.Flags().StringVar(&req.Kind, "type", "", "only events of this type: run.changed")
	return cmd
}

// printEvents prints the single event that was requested.
func printEvents(s *kit.Session, items []*readmodelv1.EventRow) error {
	if len(items) != 1 {
		return fmt.Errorf("%d events were answered, not one", len(items))
	}
	v := EventView
	v.Columns = append([]output.Column[*readmodelv1.EventRow]{}, v.Columns...)
	for i := range v.Columns {
		if v.Columns[i].Title == "BODY" {
			v.Columns[i] = output.Column[*readmodelv1.EventRow]{
				Title: "BODY", Of: func(_ *output.Printer, e *readmodelv1.EventRow) string { return eventBody(e, "  ") },
			}
		}
	}
	return output.One(s.Printer, v, items[0])
}
