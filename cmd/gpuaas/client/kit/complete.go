package kit

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// completionTime is how long a completion may take.
const completionTime = 2 * time.Second

// Complete returns the names that ask gets from the mesh, or none if the mesh does not answer.
func (p *Program) Complete(cmd *cobra.Command, ask func(context.Context, *Session) ([]string, error)) ([]string,
	cobra.ShellCompDirective,
) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	s, err := p.connect(&output.Printer{Out: io.Discard, Err: io.Discard, Format: output.FormatTable, Now: p.now})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer s.Close()
	found, err := ask(ctx, s)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// Completer returns the possible values at one place of the command line.
type Completer = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective)

// OnlyFirst completes the first argument and no further one.
func OnlyFirst(next Completer) Completer {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return next(cmd, args, begun)
	}
}

// CompleteNodes offers the names of nodes.
func (p *Program) CompleteNodes(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.Complete(cmd, func(ctx context.Context, s *Session) ([]string, error) {
		answer, err := s.Query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 200})
		return TextsOf(answer.GetItems(), (*readmodelv1.Node).GetName), err
	})
}

// CompleteTenants offers the names of tenants.
func (p *Program) CompleteTenants(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.Complete(cmd, func(ctx context.Context, s *Session) ([]string, error) {
		answer, err := s.Query.ListTenants(ctx, &readmodelv1.ListTenantsRequest{PageSize: 200})
		return TextsOf(answer.GetItems(), (*lifecyclev1.Tenant).GetName), err
	})
}

// CompleteWorkspaces offers the full names of workspaces.
func (p *Program) CompleteWorkspaces(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.Complete(cmd, func(ctx context.Context, s *Session) ([]string, error) {
		answer, err := s.Query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{PageSize: 200})
		return TextsOf(answer.GetItems(), FullName), err
	})
}

// WorkspaceFlag adds --workspace, which limits a list to those of a workspace.
func (p *Program) WorkspaceFlag(cmd *cobra.Command, workspace *string) {
	cmd.Flags().StringVar(workspace, "workspace", "", "only those of this workspace")
	_ = cmd.RegisterFlagCompletionFunc("workspace", p.CompleteWorkspaces)
}

// CompleteContexts offers the names of contexts.
func (p *Program) CompleteContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	_, file, err := contexts.Read()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return TextsOf(file.Contexts, func(c contexts.Context) string { return c.Name }), cobra.ShellCompDirectiveNoFileComp
}

// TextsOf returns the text of each item, such as its name.
func TextsOf[T any](items []T, text func(T) string) []string {
	out := make([]string, len(items))
	for i, item := range items {
		out[i] = text(item)
	}
	return out
}

// FullName returns the name of a workspace in lists of several tenants: tenant/name.
func FullName(w *readmodelv1.Workspace) string {
	if w.GetTenant() == "" {
		return w.GetName()
	}
	return w.GetTenant() + "/" + w.GetName()
}
