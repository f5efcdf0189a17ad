package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var eventView = view[*readmodelv1.EventRow]{
	name: func(e *readmodelv1.EventRow) string { return number(e.GetPosition()) },
	columns: []column[*readmodelv1.EventRow]{
		{title: "POSITION", path: "position"},
		{title: "AT", moves: true, path: "at"},
		{title: "TYPE", path: "kind"},
		{title: "OBJECT", id: true, path: "aggregate_id"},
		{title: "VERSION", drop: 1, path: "aggregate_version"},
		{title: "BODY", below: true, of: func(_ *printer, e *readmodelv1.EventRow) string { return eventBody(e, "") }},
		{title: "SOURCE", path: "source", wide: true},
		{title: "WORKSPACE", path: "workspace_id", wide: true},
		{title: "NODE", path: "node_id", wide: true},
		{title: "RUN", path: "workflow_id", wide: true},
		{title: "TASK", path: "task_id", wide: true},
		{title: "CORRELATION", path: "correlation_id", wide: true},
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

func eventsCommand(p *Program) *cobra.Command {
	return group("events", "The event log: what services wrote, with their messages, and who reads it", nil,
		eventsShow(p), eventsConsumers(p), eventsForget(p))
}

func eventsShow(p *Program) *cobra.Command {
	var page paging
	var since int64
	req := &readmodelv1.ListEventsRequest{}
	cmd := &cobra.Command{
		Use: "show [POSITION]", Short: "Show the event at a position, or those from one on, with their messages as JSON",
		Long: "Show the event at a position of the log, or with --since those from a position on, oldest first. What stands in an event as bytes is\n" +
			"printed as JSON. What an earlier build stored as JSON is withheld: it may have values of environments. It is for operators.",
		Example: "  gpuaas events show 1099511627800\n  gpuaas events show --since 1099511627776 --type run.changed --limit 20\n" +
			"  gpuaas events show --since 1099511627776 -o json --jq '.items[].body'",
		Args: cobra.MaximumNArgs(1),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			switch {
			case len(args) == 0 && since <= 0:
				return Usage(errors.New("events show: name a position, or give --since with 1 or more"))
			case len(args) == 1 && (since != 0 || req.GetKind() != "" || page.token != "" || page.limit != 0):
				return Usage(errors.New("events show POSITION: it goes without --since, --type, --limit and --page-token"))
			case len(args) == 1:
				position, err := strconv.ParseInt(args[0], 10, 64)
				if err != nil || position < 1 {
					return Usage(fmt.Errorf("position %q: it is a number of 1 or more", args[0]))
				}
				answer, err := s.client.Events.ListEvents(ctx, &readmodelv1.ListEventsRequest{Position: position})
				if err != nil {
					return err
				}
				return printEvents(s, answer.GetItems())
			}
			req.Since = since
			return show(ctx, s, page, source[*readmodelv1.EventRow]{
				view: eventView,
				fetch: func(ctx context.Context, size int32, token string) ([]*readmodelv1.EventRow, string, error) {
					req.PageSize, req.PageToken = size, token
					answer, err := s.client.Events.ListEvents(ctx, req)
					return answer.GetItems(), answer.GetNextPageToken(), err
				},
			})
		}),
	}
	cmd.Flags().IntVar(&page.limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&page.token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	cmd.Flags().Int64Var(&since, "since", 0, "the position of the first event")
	cmd.Flags().StringVar(&req.Kind, "type", "", "only events of this type: run.changed")
	return cmd
}

// printEvents prints the single event that was requested.
func printEvents(s *session, items []*readmodelv1.EventRow) error {
	if len(items) != 1 {
		return fmt.Errorf("%d events were answered, not one", len(items))
	}
	v := eventView
	v.columns = append([]column[*readmodelv1.EventRow]{}, v.columns...)
	for i := range v.columns {
		if v.columns[i].title == "BODY" {
			v.columns[i] = column[*readmodelv1.EventRow]{
				title: "BODY", of: func(_ *printer, e *readmodelv1.EventRow) string { return eventBody(e, "  ") },
			}
		}
	}
	return one(s.printer, v, items[0])
}
