package workspaces

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/operations"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// ActionView is how the operations that are possible on a workspace are printed.
var ActionView = output.View[*lifecyclev1.ActionOption]{
	Name: func(a *lifecyclev1.ActionOption) string { return operations.Verb(a.GetKind()) },
	Columns: []output.Column[*lifecyclev1.ActionOption]{
		{Title: "ACTION", Path: "kind", As: output.Dashed},
		{Title: "POSSIBLE", Of: func(_ *output.Printer, a *lifecyclev1.ActionOption) string {
			if a.GetPossible() {
				return "yes"
			}
			return "not now"
		}},
		{Title: "WHAT IT WOULD DO", Drop: 1, Path: "consequence"},
		{
			Title: "WHY NOT", Text: true,
			Of: func(_ *output.Printer, a *lifecyclev1.ActionOption) string { return strings.Join(a.GetUnmet(), "; ") },
		},
		{Title: "REASON", Path: "reason", Wide: true},
	},
}

func actionsCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "actions WS", Short: "Show which operations are possible now, why the others are not, and what each would do",
		Example: "  gpuaas workspaces actions acme/demo2", Args: kit.Args("WS"),
		ValidArgsFunction: kit.OnlyFirst(p.CompleteWorkspaces),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			answer, err := s.Query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return output.List(s.Printer, ActionView, answer.GetActions(), "")
		}),
	}
}
