package client

import (
	"cmp"
	"context"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/spf13/cobra"
)

func workspacesWatch(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "watch [WS]", Short: "Print every change of a workspace with its steps, or of all workspaces, until Ctrl-C",
		Example: "  gpuaas workspaces watch acme/demo2\n  gpuaas workspaces watch -o jsonl", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req := &readmodelv1.WatchRequest{Topics: []readmodelv1.Topic{readmodelv1.Topic_TOPIC_WORKSPACES}}
			if len(args) == 1 {
				id, err := s.workspaceID(ctx, args[0])
				if err != nil {
					return err
				}
				req.Workspace = id
				req.Topics = append(req.Topics, readmodelv1.Topic_TOPIC_STEPS)
			}
			return s.printChanges(ctx, req, func(item *readmodelv1.WatchItem) (string, []string) {
				if step := item.GetStep(); step != nil {
					return "step " + number(step.GetStep()+1) + " " + step.GetName(), []string{
						enumText(step.GetDirection()), enumText(step.GetState()), "attempt " + number(step.GetAttempt()),
						cmp.Or(step.GetError(), step.GetWhyWaiting()),
					}
				}
				w := item.GetWorkspace()
				return cmp.Or(fullName(w), item.GetId()),
					[]string{
						enumText(w.GetState()), enumText(w.GetUserState()), w.GetCurrentStep(),
						cmp.Or(cmp.Or(cmp.Or(w.GetAgentDetail(), w.GetWorkloadDetail()), w.GetLastError()), w.GetWhyWaiting()),
					}
			})
		}),
	}
}
