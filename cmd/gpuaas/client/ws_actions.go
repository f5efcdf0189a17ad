package client

import (
	"context"
	"strings"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/spf13/cobra"
)

var actionView = view[*lifecyclev1.ActionOption]{
	name: func(a *lifecyclev1.ActionOption) string { return verb(a.GetKind()) },
	columns: []column[*lifecyclev1.ActionOption]{
		{title: "ACTION", path: "kind", as: dashed},
		{title: "POSSIBLE", of: func(_ *printer, a *lifecyclev1.ActionOption) string {
			if a.GetPossible() {
				return "yes"
			}
			return "not now"
		}},
		{title: "WHAT IT WOULD DO", drop: 1, path: "consequence"},
		{
			title: "WHY NOT", text: true,
			of: func(_ *printer, a *lifecyclev1.ActionOption) string { return strings.Join(a.GetUnmet(), "; ") },
		},
		{title: "REASON", path: "reason", wide: true},
	},
}

func workspacesActions(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "actions WS", Short: "Show which operations are possible now, why the others are not, and what each would do",
		Example: "  gpuaas workspaces actions acme/demo2", Args: args("WS"),
		ValidArgsFunction: onlyFirst(p.completeWorkspaces),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			answer, err := s.query.GetActions(ctx, &readmodelv1.GetActionsRequest{Workspace: args[0]})
			if err != nil {
				return err
			}
			return list(s.printer, actionView, answer.GetActions(), "")
		}),
	}
}
