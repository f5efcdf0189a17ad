package client

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// completionTime is how long a completion may take.
const completionTime = 2 * time.Second

// complete returns the names that ask gets from the mesh, or none if the mesh does not answer.
func (p *Program) complete(cmd *cobra.Command, ask func(context.Context, *session) ([]string, error)) ([]string,
	cobra.ShellCompDirective,
) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	s, err := p.connect(&printer{out: io.Discard, err: io.Discard, format: formatTable, now: p.now})
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer s.close()
	found, err := ask(ctx, s)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return found, cobra.ShellCompDirectiveNoFileComp
}

// completer returns the possible values at one place of the command line.
type completer = func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective)

// onlyFirst completes the first argument and no further one.
func onlyFirst(next completer) completer {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return next(cmd, args, begun)
	}
}

func (p *Program) completeNodes(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.complete(cmd, func(ctx context.Context, s *session) ([]string, error) {
		answer, err := s.query.ListNodes(ctx, &readmodelv1.ListNodesRequest{PageSize: 200})
		return namesOf(answer.GetItems(), (*readmodelv1.Node).GetName), err
	})
}

func (p *Program) completeTenants(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.complete(cmd, func(ctx context.Context, s *session) ([]string, error) {
		answer, err := s.query.ListTenants(ctx, &readmodelv1.ListTenantsRequest{PageSize: 200})
		return namesOf(answer.GetItems(), (*lifecyclev1.Tenant).GetName), err
	})
}

func (p *Program) completeWorkspaces(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return p.complete(cmd, func(ctx context.Context, s *session) ([]string, error) {
		answer, err := s.query.ListWorkspaces(ctx, &readmodelv1.ListWorkspacesRequest{PageSize: 200})
		return namesOf(answer.GetItems(), fullName), err
	})
}

func (p *Program) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	path, err := contexts.DefaultPath()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	file, err := contexts.Load(path)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return namesOf(file.Contexts, func(c contexts.Context) string { return c.Name }), cobra.ShellCompDirectiveNoFileComp
}

func namesOf[T any](items []T, name func(T) string) []string {
	out := make([]string, len(items))
	for i, item := range items {
		out[i] = name(item)
	}
	return out
}

// fullName returns the name of a workspace in lists of several tenants: tenant/name.
func fullName(w *readmodelv1.Workspace) string {
	if w.GetTenant() == "" {
		return w.GetName()
	}
	return w.GetTenant() + "/" + w.GetName()
}
