package workspaces

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

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

// condition is the condition of `--for` on a workspace.
type condition struct {
	text  string
	holds func(*readmodelv1.Workspace) bool
}

// parseCondition reads `state=active`, `state=active,failed`, or `user_state=normal`.
func parseCondition(text string) (condition, error) {
	field, values, ok := strings.Cut(text, "=")
	if !ok || values == "" {
		return condition{}, exit.Usage(fmt.Errorf("--for %q is not FIELD=VALUE, such as state=active", text))
	}
	wanted := map[string]bool{}
	for value := range strings.SplitSeq(values, ",") {
		wanted[value] = true
		var err error
		switch field {
		case "state":
			_, err = kit.ParseEnum[commonv1.WorkspaceState]("for", value)
		case "user_state":
			_, err = kit.ParseEnum[commonv1.UserState]("for", value)
		default:
			err = exit.Usage(fmt.Errorf("--for %q: only state and user_state can be waited for", text))
		}
		if err != nil {
			return condition{}, err
		}
	}
	return condition{text, func(w *readmodelv1.Workspace) bool {
		if field == "state" {
			return wanted[human.Enum(w.GetState())]
		}
		return wanted[human.Enum(w.GetUserState())]
	}}, nil
}
