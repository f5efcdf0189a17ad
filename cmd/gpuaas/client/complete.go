package client

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/policy"
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

// files are the flags whose values are files or directories: the shell completes those by itself.
var files = map[string]bool{"spec": true, "out": true, "ca-file": true, "token-file": true, "file": true}

// completeNothingElse keeps the shell from offering file names where none belongs: at the arguments of the client's
// commands, and at the values of their flags.
func completeNothingElse(root *cobra.Command) {
	for _, cmd := range root.Commands() {
		if cmd.GroupID == groupID {
			completeNothing(cmd)
		}
	}
}

func completeNothing(cmd *cobra.Command) {
	if cmd.ValidArgsFunction == nil && len(cmd.ValidArgs) == 0 && !cmd.HasSubCommands() {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	cmd.LocalNonPersistentFlags().VisitAll(func(flag *pflag.Flag) {
		if !files[flag.Name] {
			// an error means that the flag has a completion already
			_ = cmd.RegisterFlagCompletionFunc(flag.Name, cobra.NoFileCompletions)
		}
	})
	for _, sub := range cmd.Commands() {
		completeNothing(sub)
	}
}

// completePolicyKeys offers the keys of this build, and the default of a key where its value is to follow.
func completePolicyKeys(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		var out []string
		for _, key := range policy.Keys() {
			out = append(out, key.Name)
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	case 1:
		if key, known := policy.Lookup(args[0]); known {
			return []string{key.Default}, cobra.ShellCompDirectiveNoFileComp
		}
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// completeConditions offers what can be waited for.
func completeConditions(_ *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
	const more = cobra.ShellCompDirectiveNoFileComp | cobra.ShellCompDirectiveNoSpace
	values := map[string][]string{
		"state":      names.Spellings[commonv1.WorkspaceState](),
		"user_state": names.Spellings[commonv1.UserState](),
	}
	before := strings.LastIndexByte(begun, ',') + 1
	field, _, ok := strings.Cut(begun, "=")
	if !ok {
		return []string{"state=", "user_state="}, more
	}
	prefix := begun[:before]
	if before == 0 {
		prefix = field + "="
	}
	var out []string
	for _, value := range values[field] {
		out = append(out, prefix+value)
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
