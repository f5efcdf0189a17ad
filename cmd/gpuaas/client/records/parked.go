package records

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/app"
)

// ParkedView is how parked events are printed.
var ParkedView = output.View[*readmodelv1.ParkedEvent]{
	Name: func(e *readmodelv1.ParkedEvent) string { return e.GetConsumer() + " " + human.Number(e.GetPosition()) },
	Columns: []output.Column[*readmodelv1.ParkedEvent]{
		{Title: "CONSUMER", Path: "consumer"},
		{Title: "POSITION", Path: "position"},
		{Title: "TYPE", Path: "kind"},
		{Title: "ATTEMPTS", Path: "attempts"},
		{Title: "PARKED", Moves: true, Path: "parked_at"},
		{Title: "REPLAY ASKED", Drop: 1, Moves: true, Path: "asked_at"},
		{Title: "ERROR", Text: true, Below: true, Path: "error"},
	},
}

func eventsParked(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListParkedRequest{}
	cmd := &cobra.Command{
		Use: "parked [CONSUMER]", Short: "List the events that consumers could not apply and passed over, with the error",
		Long: "List the parked events of all consumers, or of one, SERVICE/NAME as `gpuaas events consumers` shows it. A " +
			"consumer goes on without what it\n" +
			"has parked, so what it makes of the events may lack something. Such an event counts as unread and is not cut, " +
			"nor is any after it.\n" +
			"`gpuaas events show POSITION` prints it; `replay` has it applied again, after an update for example; `drop` " +
			"gives it up.",
		Example: "  gpuaas events parked\n  gpuaas events parked lifecycle/sessions -o json",
		Args:    kit.ArgsFrom(0, "CONSUMER"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			if len(args) == 1 {
				req.Consumer = args[0]
			}
			return kit.Show(ctx, s, page, kit.Source[*readmodelv1.ParkedEvent]{
				View: ParkedView, Fetch: kit.Method(s.Client.Events.ListParked, req),
			})
		}),
	}
	cmd.Flags().IntVar(&page.Limit, "limit", 0, "at most this many items (default all)")
	cmd.Flags().StringVar(&page.Token, "page-token", "", "go on after an earlier list with --limit: its next_page_token")
	return cmd
}

func eventsReplay(p *kit.Program) *cobra.Command {
	req := &readmodelv1.ReplayParkedRequest{}
	var all bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "replay CONSUMER [POSITION]",
		Short: "Have a consumer apply a parked event again, or all with --all, and wait for it",
		Long: "Have a consumer apply again what it has parked, with its next batch, and wait until it has. An event that " +
			"it applies is not parked any\n" +
			"more; one that it cannot apply this time either stays parked, with one attempt more. Exit code 5: something is " +
			"still parked. One call\n" +
			"with --all asks for up to 10,000 events. The consumers of recovery apply events in their order alone, and " +
			"refuse a replay.",
		Example: "  gpuaas events replay lifecycle/sessions 1099511627800 --reason 'fixed by the update'\n" +
			"  gpuaas events replay lifecycle/sessions --all --reason 'fixed by the update'",
		Args: kit.ArgsFrom(1, "CONSUMER", "POSITION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Consumer = args[0]
			var err error
			switch {
			case len(args) == 1 && !all:
				return exit.Usage(errors.New("events replay: name a position, or give --all"))
			case len(args) == 2 && all:
				return exit.Usage(errors.New("events replay: a position goes without --all"))
			case len(args) == 2:
				if req.Position, err = parkedPosition(args[1]); err != nil {
					return err
				}
			}
			if _, err := s.Client.Events.ReplayParked(ctx, req); err != nil {
				return err
			}
			left, err := awaitReplay(ctx, s, req, timeout)
			if err != nil {
				return err
			}
			if len(left) == 0 {
				human.Note(s.Err, "%s has applied what was asked for", human.Clean(req.GetConsumer()))
			}
			if err := output.List(s.Printer, ParkedView, left, ""); err != nil || len(left) == 0 {
				return err
			}
			return &exit.Error{
				Code: exit.CodeRefused, Reason: commonv1.Reason_REASON_PRECONDITION_FAILED,
				Message: fmt.Sprintf("%s still has %d events parked", human.Clean(req.GetConsumer()), len(left)),
				Remedy: "the error says why; repair what it names and replay again, or give an event up with `gpuaas events " +
					"drop`",
			}
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "all that the consumer has parked")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "how long to wait")
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// awaitReplay waits until each event that was asked for has been applied or parked again, and returns those that are
// parked.
func awaitReplay(ctx context.Context, s *kit.Session, req *readmodelv1.ReplayParkedRequest, timeout time.Duration) (
	[]*readmodelv1.ParkedEvent, error,
) {
	const every = 300 * time.Millisecond
	until := time.Now().Add(timeout)
	for {
		left, waits, err := parkedOf(ctx, s, req)
		if err != nil || waits == 0 {
			return left, err
		}
		if time.Now().After(until) {
			return nil, &exit.Error{
				Code: exit.CodeTimeout, Reason: commonv1.Reason_REASON_DEADLINE_EXCEEDED,
				Message: fmt.Sprintf("%s has not tried %d events yet", human.Clean(req.GetConsumer()), waits),
				Remedy:  "it tries them with its next batch; `gpuaas events parked` shows what is left",
			}
		}
		if !app.Sleep(ctx, every) {
			return nil, context.Cause(ctx)
		}
	}
}

// parkedOf returns what is parked of what a request asks for, and how many of these have not been tried again.
func parkedOf(ctx context.Context, s *kit.Session, req *readmodelv1.ReplayParkedRequest) ([]*readmodelv1.ParkedEvent,
	int, error,
) {
	const size = 1000
	list := &readmodelv1.ListParkedRequest{Consumer: req.GetConsumer(), PageSize: size}
	if req.GetPosition() > 0 {
		list.PageSize, list.PageToken = 1, fmt.Sprintf("%d:%s", req.GetPosition()-1, req.GetConsumer())
	}
	var left []*readmodelv1.ParkedEvent
	waits := 0
	for {
		answer, err := s.Client.Events.ListParked(ctx, list)
		if err != nil {
			return nil, 0, err
		}
		for _, e := range answer.GetItems() {
			if req.GetPosition() > 0 && e.GetPosition() != req.GetPosition() {
				continue
			}
			left = append(left, e)
			if e.GetAskedAt() != nil {
				waits++
			}
		}
		list.PageToken = answer.GetNextPageToken()
		if list.GetPageToken() == "" || req.GetPosition() > 0 {
			return left, waits, nil
		}
	}
}

func eventsDrop(p *kit.Program) *cobra.Command {
	req := &readmodelv1.DropParkedRequest{}
	cmd := &cobra.Command{
		Use: "drop CONSUMER POSITION", Short: "Give a parked event up: its consumer passes it over for good",
		Long: "Give up an event that a consumer has parked and that will never be applied. What the consumer makes of the " +
			"events lacks it for good; the\n" +
			"event itself stays in the log until its term. The entry of the audit log keeps its type and its error.",
		Example: "  gpuaas events drop readmodel/projections 1099511627800 --reason 'of a build that is gone' --dry-run",
		Args:    kit.Args("CONSUMER", "POSITION"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Consumer = args[0]
			var err error
			if req.Position, err = parkedPosition(args[1]); err != nil {
				return err
			}
			if err := s.Confirmed(ctx, losesParked(s, req)); err != nil {
				return err
			}
			answer, err := s.Client.Events.DropParked(ctx, req)
			if err != nil {
				return err
			}
			what := "%s passes the event at %d over for good"
			if req.GetDryRun() {
				what = "dry run, nothing was changed: %s would pass the event at %d over for good"
			}
			human.Note(s.Err, what, human.Clean(req.GetConsumer()), req.GetPosition())
			return output.One(s.Printer, ParkedView, answer.GetEvent())
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	kit.Asks(cmd)
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesParked returns the question about a parked event.
func losesParked(s *kit.Session, req *readmodelv1.DropParkedRequest) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.Client.Events.DropParked(ctx, dry)
		if err != nil {
			return kit.Question{}, err
		}
		return kit.Question{Name: req.GetConsumer(), Lost: []string{
			fmt.Sprintf("%s will pass over the event %s at %d for good.", req.GetConsumer(), answer.GetEvent().GetKind(),
				req.GetPosition()),
		}}, nil
	}
}

func parkedPosition(text string) (int64, error) {
	position, err := strconv.ParseInt(text, 10, 64)
	if err != nil || position < 1 {
		return 0, exit.Usage(fmt.Errorf("position %q: it is a number of 1 or more", text))
	}
	return position, nil
}
