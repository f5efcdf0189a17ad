package nodes

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func acceptFactsCommand(p *kit.Program) *cobra.Command {
	var reason string
	cmd := &cobra.Command{
		Use:   "accept-facts NODE",
		Short: "Accept the GPUs, driver, kernel and container runtime that a node has now",
		Long: "Accept the GPUs, driver, kernel and container runtime that a node has now, which ends host_runtime_drift " +
			"and the cordon that it set. Use it after a change of the host that was meant; a host that was not to " +
			"change is repaired or installed anew instead.",
		Example: "  gpuaas nodes accept-facts node-1 --reason 'driver 570 was installed on purpose'",
		Args:    kit.Args("NODE"), ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Client.HostFacts.AcceptHostFacts(ctx,
				&readmodelv1.AcceptHostFactsRequest{Node: args[0], Reason: reason})
			if err != nil {
				return err
			}
			found, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0]})
			if err != nil {
				return err
			}
			return nodeAfter(ctx, s, answer.GetPos(), found.GetNode())
		}),
	}
	kit.ReasonFlag(cmd, &reason, true)
	return cmd
}
