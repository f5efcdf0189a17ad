package client

import (
	"context"
	"fmt"
	"slices"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/spf13/cobra"
)

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

var policyView = view[*recoveryv1.PolicyKey]{
	name: (*recoveryv1.PolicyKey).GetKey,
	columns: []column[*recoveryv1.PolicyKey]{
		{title: "KEY", path: "key"},
		{title: "VALUE", path: "value"},
		{title: "DEFAULT", drop: 1, path: "default_value"},
		{title: "FROM", drop: 2, path: "minimum"},
		{title: "TO", drop: 3, path: "maximum"},
		{
			title: "CHANGED BY", drop: 4,
			of: func(_ *printer, k *recoveryv1.PolicyKey) string { return onlyIf(k.GetOverridden(), k.GetUpdatedBy()) },
		},
		{title: "MEANING", path: "meaning", wide: true},
	},
	more: []column[*recoveryv1.PolicyKey]{
		{title: "CHANGED", path: "updated_at"},
		{title: "REASON", path: "reason"},
	},
}

func policyCommand(p *Program) *cobra.Command {
	get := &cobra.Command{
		Use: "get [KEY]", Short: "Show the policy keys with their values and bounds",
		Example: "  gpuaas policy get\n  gpuaas policy get node.heartbeat_stale_after_seconds", Args: cobra.MaximumNArgs(1),
		ValidArgsFunction: onlyFirst(completePolicyKeys),
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			key := ""
			if len(args) == 1 {
				key = args[0]
			}
			answer, err := s.query.GetPolicy(ctx, &readmodelv1.GetPolicyRequest{Key: key})
			if err != nil {
				return err
			}
			if key == "" {
				return list(s.printer, policyView, answer.GetItems(), "")
			}
			i := slices.IndexFunc(answer.GetItems(), func(k *recoveryv1.PolicyKey) bool { return k.GetKey() == key })
			if i < 0 {
				return fault.New(commonv1.Reason_REASON_POLICY_KEY_UNKNOWN, fmt.Sprintf("there is no policy key %q", key))
			}
			return one(s.printer, policyView, answer.GetItems()[i])
		}),
	}
	req := &readmodelv1.SetPolicyRequest{}
	set := &cobra.Command{
		Use: "set KEY VALUE", Short: "Change a policy key within its bounds",
		Example:           "  gpuaas policy set node.heartbeat_stale_after_seconds 300 --reason 'slow links'",
		Args:              args("KEY", "VALUE"),
		ValidArgsFunction: completePolicyKeys,
		RunE: p.run(func(ctx context.Context, s *session, args []string) error {
			req.Key, req.Value = args[0], args[1]
			answer, err := s.command.SetPolicy(ctx, req)
			if err != nil {
				return err
			}
			return one(s.printer, policyView, answer.GetKey(), with("pos", answer.GetPos()))
		}),
	}
	reasonFlag(set, &req.Reason, false)
	set.Flags().BoolVar(&req.AcknowledgeWeakening, "acknowledge-weakening", false,
		"accept that the new value weakens a budget; needs --reason")
	return group("policy", "Policy keys: intervals, budgets and limits", nil, get, set)
}
