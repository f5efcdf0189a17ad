package workspaces

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func watchCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "watch [WS]", Short: "Print every change of a workspace with its steps, or of all workspaces, until Ctrl-C",
		Example: "  gpuaas workspaces watch acme/demo2\n  gpuaas workspaces watch -o jsonl", Args: kit.ArgsFrom(0, "WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req := &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
			if len(args) == 1 {
				var err error
				if req.Workspace, err = s.WorkspaceID(ctx, args[0]); err != nil {
					return err
				}
				req.Topics = append(req.Topics, readmodelv1.Topic_TOPIC_STEPS)
			}
			return s.PrintChanges(ctx, req, func(item *readmodelv1.WatchItem) (string, []string) {
				if step := item.GetStep(); step != nil {
					return "step " + human.Number(step.GetStep()+1) + " " + step.GetName(), []string{
						human.Enum(step.GetDirection()), human.Enum(step.GetState()), "attempt " + human.Number(step.GetAttempt()),
						cmp.Or(step.GetError(), step.GetWhyWaiting()),
					}
				}
				w := item.GetWorkspace()
				return cmp.Or(kit.FullName(w), item.GetId()),
					[]string{
						human.Enum(w.GetState()), human.Enum(w.GetUserState()), w.GetCurrentStep(),
						cmp.Or(cmp.Or(cmp.Or(w.GetAgentDetail(), w.GetWorkloadDetail()), w.GetLastError()), w.GetWhyWaiting()),
					}
			})
		}),
	}
}
