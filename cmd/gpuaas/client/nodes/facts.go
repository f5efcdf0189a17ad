package nodes

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/shown"
)

func acceptFactsCommand(p *kit.Program) *cobra.Command {
	var reason, saw string
	cmd := &cobra.Command{
		Use:   "accept-facts NODE",
		Short: "Accept the GPUs, driver, kernel and container runtime that a node has now",
		Long: "Accept the GPUs, driver, kernel and container runtime that a node has now, which ends host_runtime_drift " +
			"and the cordon that it set. Use it after a change of the host that was meant; a host that was not to " +
			"change is repaired or installed anew instead. What is accepted is what the mesh shows of the node when the " +
			"command runs, or what `gpuaas nodes get` showed with the fingerprint that --seen names; if the host differs in " +
			"another way by then, nothing is accepted and the exit code is 5.",
		Example: "  gpuaas nodes accept-facts node-1 --reason 'driver 570 was installed on purpose'\n" +
			"  gpuaas nodes accept-facts node-1 --seen 0a1b2c3d4e5f6071 --reason 'driver 570 was installed on purpose'",
		Args: kit.Args("NODE"), ValidArgsFunction: kit.OnlyFirst(p.CompleteNodes),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			found, err := s.Query.GetNode(ctx, &readmodelv1.GetNodeRequest{Node: args[0]})
			if err != nil {
				return err
			}
			if saw == "" {
				differs, _ := runtimeDrift(found.GetNode().GetVerdict())
				saw = shown.Fingerprint(differs)
			}
			answer, err := s.Client.HostFacts.AcceptHostFacts(ctx,
				&readmodelv1.AcceptHostFactsRequest{Node: args[0], Reason: reason, Seen: saw})
			if err != nil {
				return err
			}
			if differs := answer.GetAccepted(); differs != "" {
				human.Note(s.Err, "accepted: %s", human.Clean(differs))
			} else {
				human.Note(s.Err, "nothing was changed: the host has what was accepted")
			}
			return nodeAfter(ctx, s, answer.GetPos(), found.GetNode(), nil)
		}),
	}
	kit.ReasonFlag(cmd, &reason, true)
	cmd.Flags().StringVar(&saw, "seen", "", "fingerprint of the facts that were looked at, as nodes get prints it")
	return cmd
}
