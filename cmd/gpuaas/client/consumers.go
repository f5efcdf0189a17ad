package client

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var consumerView = view[*readmodelv1.EventConsumer]{
	name: func(c *readmodelv1.EventConsumer) string { return c.GetConsumer() },
	columns: []column[*readmodelv1.EventConsumer]{
		{title: "CONSUMER", path: "consumer"},
		{title: "POSITION", path: "position"},
		{title: "BEHIND", path: "behind"},
		{title: "PARKED", path: "parked"},
		{title: "REPLICAS", of: func(_ *printer, c *readmodelv1.EventConsumer) string {
			if c.GetReplicas() == 0 && c.GetUnknownReplicas() > 0 {
				return fmt.Sprintf("unknown (%d)", c.GetUnknownReplicas())
			}
			return number(c.GetReplicas())
		}},
		{title: "READ LAST", drop: 1, moves: true, path: "moved_at"},
	},
}

func eventsConsumers(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "consumers", Short: "List the consumers of events, where each stands, and how many live replicas run it",
		Long: "List the consumers of events of all services. Events behind the slowest one are kept, whatever their term: one with no replica that has\n" +
			"not read them keeps them for ever. `gpuaas events forget` ends that. A replica is alive if it has reported within 30 s.",
		Example: "  gpuaas events consumers\n  gpuaas events consumers -o json --jq '.items[] | select(.replicas == 0) | .consumer'",
		Args:    args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.client.Events.ListConsumers(ctx, &readmodelv1.ListConsumersRequest{})
			if err != nil {
				return err
			}
			return list(s.printer, consumerView, answer.GetItems(), "")
		}),
	}
}

func eventsForget(p *Program) *cobra.Command {
	req := &readmodelv1.ForgetConsumerRequest{}
	cmd := &cobra.Command{
		Use: "forget CONSUMER", Short: "Forget a consumer that no build runs any more, so that no events are kept for it",
		Long: "Forget a consumer of events, SERVICE/NAME as `gpuaas events consumers` shows it: its position and what it has parked. Events are kept for\n" +
			"it no longer. It is refused while a live replica runs the consumer, and until it has not moved for ten minutes. Each call removes up to 10,000\n" +
			"parked events, and says if some are left. A service that runs the consumer later begins at the oldest event.",
		Example: "  gpuaas events forget lifecycle/row-witness --reason 'no build has it any more' --dry-run",
		Args:    args("CONSUMER"),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Consumer = args[0]
			if err := s.confirmed(ctx, losesConsumer(s, req)); err != nil {
				return err
			}
			answer, err := s.client.Events.ForgetConsumer(ctx, req)
			if err != nil {
				return err
			}
			switch {
			case answer.GetConsumer() == nil:
				note(s.err, "there is no consumer %s: nothing was changed", clean(args[0]))
				return nil
			case req.GetDryRun():
				note(s.err, "dry run, nothing was changed: %s would be forgotten", clean(args[0]))
			default:
				note(s.err, "%s is forgotten: no events are kept for it", clean(args[0]))
			}
			if answer.GetParkedLeft() && !req.GetDryRun() {
				note(s.err, "some of what it has parked is left: run the same command again to remove more")
			}
			return one(s.printer, consumerView, answer.GetConsumer())
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	asks(cmd)
	reasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesConsumer returns the question about a consumer, with the position of its cursor.
func losesConsumer(s *session, req *readmodelv1.ForgetConsumerRequest) func(context.Context) (question, error) {
	return func(ctx context.Context) (question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.client.Events.ForgetConsumer(ctx, dry)
		if err != nil {
			return question{}, err
		}
		c := answer.GetConsumer()
		return question{name: req.GetConsumer(), lost: []string{
			fmt.Sprintf("The consumer %s will be forgotten: %d positions that it has not read, and %d events that it has parked, are kept for it no longer.",
				req.GetConsumer(), c.GetBehind(), c.GetParked()),
		}}, nil
	}
}
