package records

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// ConsumerView is how consumers of events are printed.
var ConsumerView = output.View[*readmodelv1.EventConsumer]{
	Name: func(c *readmodelv1.EventConsumer) string { return c.GetConsumer() },
	Columns: []output.Column[*readmodelv1.EventConsumer]{
		{Title: "CONSUMER", Path: "consumer"},
		{Title: "POSITION", Path: "position"},
		{Title: "BEHIND", Path: "behind"},
		{Title: "PARKED", Path: "parked"},
		{Title: "REPLICAS", Of: func(_ *output.Printer, c *readmodelv1.EventConsumer) string {
			if c.GetReplicas() == 0 && c.GetUnknownReplicas() > 0 {
				return fmt.Sprintf("unknown (%d)", c.GetUnknownReplicas())
			}
			return human.Number(c.GetReplicas())
		}},
		{Title: "READ LAST", Drop: 1, Moves: true, Path: "moved_at"},
	},
}

func eventsConsumers(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "consumers", Short: "List the consumers of events, where each stands, and how many live replicas run it",
		Long: "List the consumers of events of all services. Events behind the slowest one are kept, whatever their term: " +
			"one with no replica that has\n" +
			"not read them keeps them for ever. `gpuaas events forget` ends that. A replica is alive if it has reported " +
			"within 30 s.",
		Example: "  gpuaas events consumers\n  gpuaas events consumers -o json --jq '.items[] | select(.replicas == 0) | " +
			".consumer'",
		Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			answer, err := s.Client.Events.ListConsumers(ctx, &readmodelv1.ListConsumersRequest{})
			if err != nil {
				return err
			}
			return output.List(s.Printer, ConsumerView, answer.GetItems(), "")
		}),
	}
}

func eventsForget(p *kit.Program) *cobra.Command {
	req := &readmodelv1.ForgetConsumerRequest{}
	cmd := &cobra.Command{
		Use: "forget CONSUMER", Short: "Forget a consumer that no build runs any more, so that no events are kept for it",
		Long: "Forget a consumer of events, SERVICE/NAME as `gpuaas events consumers` shows it: its position and what it " +
			"has parked. Events are kept for\n" +
			"it no longer. It is refused while a live replica runs the consumer, and until it has not moved for ten minutes. " +
			"Each call removes up to 10,000\n" +
			"parked events, and says if some are left. A service that runs the consumer later begins at the oldest event.",
		Example: "  gpuaas events forget lifecycle/row-witness --reason 'no build has it any more' --dry-run",
		Args:    kit.Args("CONSUMER"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Consumer = args[0]
			if err := s.Confirmed(ctx, losesConsumer(s, req)); err != nil {
				return err
			}
			answer, err := s.Client.Events.ForgetConsumer(ctx, req)
			if err != nil {
				return err
			}
			switch {
			case answer.GetConsumer() == nil:
				human.Note(s.Err, "there is no consumer %s: nothing was changed", human.Clean(args[0]))
				return nil
			case req.GetDryRun():
				human.Note(s.Err, "dry run, nothing was changed: %s would be forgotten", human.Clean(args[0]))
			default:
				human.Note(s.Err, "%s is forgotten: no events are kept for it", human.Clean(args[0]))
			}
			if answer.GetParkedLeft() && !req.GetDryRun() {
				human.Note(s.Err, "some of what it has parked is left: run the same command again to remove more")
			}
			return output.One(s.Printer, ConsumerView, answer.GetConsumer())
		}),
	}
	cmd.Flags().BoolVar(&req.DryRun, "dry-run", false, "only show what it would do")
	kit.Asks(cmd)
	kit.ReasonFlag(cmd, &req.Reason, true)
	return cmd
}

// losesConsumer returns the question about a consumer, with the position of its cursor.
func losesConsumer(s *kit.Session, req *readmodelv1.ForgetConsumerRequest) func(context.Context) (kit.Question, error) {
	return func(ctx context.Context) (kit.Question, error) {
		dry := proto.CloneOf(req)
		dry.DryRun = true
		answer, err := s.Client.Events.ForgetConsumer(ctx, dry)
		if err != nil {
			return kit.Question{}, err
		}
		c := answer.GetConsumer()
		return kit.Question{Name: req.GetConsumer(), Lost: []string{
			fmt.Sprintf("The consumer %s will be forgotten: %d positions that it has not read, and %d events that it has "+
				"parked, are kept for it no longer.",
				req.GetConsumer(), c.GetBehind(), c.GetParked()),
		}}, nil
	}
}
