package controlplane

import (
	"context"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
)

// completePolicyKeys offers the keys of this build, and the default of a key where its value is to follow.
func completePolicyKeys(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return kit.TextsOf(policy.Keys(), func(key policy.Key) string { return key.Name }), cobra.ShellCompDirectiveNoFileComp
	case 1:
		if key, known := policy.Lookup(args[0]); known {
			return []string{key.Default}, cobra.ShellCompDirectiveNoFileComp
		}
	}
	return nil, cobra.ShellCompDirectiveNoFileComp
}

// PolicyView is how policy keys are printed.
var PolicyView = output.View[*recoveryv1.PolicyKey]{
	Name: (*recoveryv1.PolicyKey).GetKey,
	Columns: []output.Column[*recoveryv1.PolicyKey]{
		{Title: "KEY", Path: "key"},
		{Title: "VALUE", Path: "value"},
		{Title: "DEFAULT", Drop: 1, Path: "default_value"},
		{Title: "FROM", Drop: 2, Path: "minimum"},
		{Title: "TO", Drop: 3, Path: "maximum"},
		{
			Title: "CHANGED BY", Drop: 4,
			Of: func(_ *output.Printer, k *recoveryv1.PolicyKey) string {
				return human.OnlyIf(k.GetOverridden(), k.GetUpdatedBy())
			},
		},
		{Title: "MEANING", Path: "meaning", Wide: true},
	},
	More: []output.Column[*recoveryv1.PolicyKey]{
		{Title: "CHANGED", Path: "updated_at"},
		{Title: "REASON", Path: "reason"},
	},
}

// PolicyCommand returns the commands about policy keys.
func PolicyCommand(p *kit.Program) *cobra.Command {
	get := &cobra.Command{
		Use: "get [KEY]", Aliases: []string{"list", "ls"}, Short: "Show the policy keys with their values and bounds",
		Example: "  gpuaas policy get\n  gpuaas policy get node.heartbeat_stale_after_seconds", Args: kit.ArgsFrom(0, "KEY"),
		ValidArgsFunction: kit.OnlyFirst(completePolicyKeys),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			key := ""
			if len(args) == 1 {
				key = args[0]
			}
			answer, err := s.Query.GetPolicy(ctx, &readmodelv1.GetPolicyRequest{Key: key})
			if err != nil {
				return err
			}
			if key == "" {
				return output.List(s.Printer, PolicyView, answer.GetItems(), "")
			}
			i := slices.IndexFunc(answer.GetItems(), func(k *recoveryv1.PolicyKey) bool { return k.GetKey() == key })
			if i < 0 {
				return fault.New(commonv1.Reason_REASON_POLICY_KEY_UNKNOWN, fmt.Sprintf("there is no policy key %q", key))
			}
			return output.One(s.Printer, PolicyView, answer.GetItems()[i])
		}),
	}
	req := &readmodelv1.SetPolicyRequest{}
	set := &cobra.Command{
		Use: "set KEY VALUE", Short: "Change a policy key within its bounds",
		Long: "Change a policy key within its bounds.\n\n" +
			"A value may be tightened freely. One that is weaker than the default and than the present value is refused\n" +
			"for a budget of the failure matrix, and for a limit of severity P0 or P1, unless --acknowledge-weakening\n" +
			"and --reason are given. The audit log keeps who did it, the reason and both values.",
		Example: "  gpuaas policy set node.heartbeat_stale_after_seconds 60\n" +
			"  gpuaas policy set budget.p1.recover_seconds 7200 --acknowledge-weakening --reason 'the site moves'",
		Args:              kit.Args("KEY", "VALUE"),
		ValidArgsFunction: completePolicyKeys,
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			req.Key, req.Value = args[0], args[1]
			answer, err := s.Command.SetPolicy(ctx, req)
			if err != nil {
				return err
			}
			return output.One(s.Printer, PolicyView, answer.GetKey(), output.With("pos", answer.GetPos()))
		}),
	}
	kit.ReasonFlag(set, &req.Reason, false)
	set.Flags().BoolVar(&req.AcknowledgeWeakening, "acknowledge-weakening", false,
		"accept that the new value is weaker than the default; needs --reason")
	return kit.Group("policy", "Policy keys: intervals, budgets and limits", nil, get, set)
}
