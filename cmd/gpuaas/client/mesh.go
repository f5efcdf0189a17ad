package client

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/contexts"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

func statusCommand(p *Program) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the state of each part of the mesh",
		Example: "  gpuaas status\n  gpuaas status -o json --jq '.components[] | select(.ok | not).name'", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			answer, err := s.query.GetStatus(ctx, &readmodelv1.GetStatusRequest{})
			if err != nil {
				return err
			}
			wrong, err := readTrouble(ctx, s)
			if err != nil {
				return err
			}
			if s.structured() {
				return object(s.printer, answer, wrong.members()...)
			}
			if s.format == formatName {
				for _, c := range answer.GetComponents() {
					if err := s.line(clean(c.GetName())); err != nil {
						return err
					}
				}
				return nil
			}
			if err := table(s.printer, componentColumns, answer.GetComponents()); err != nil {
				return err
			}
			if err := s.section("NAME", "VALUE"); err != nil {
				return err
			}
			return s.pairs(slices.Concat(rollbackLines(answer.GetComponents()), [][2]string{
				{"NODES", fmt.Sprintf("%d, %d connected", answer.GetNodes(), answer.GetNodesConnected())},
				{"WORKSPACES", fmt.Sprintf("%d, %d active", answer.GetWorkspaces(), answer.GetWorkspacesActive())},
				{"LIVE RUNS", number(answer.GetLiveRuns())},
				{"FINDINGS", fmt.Sprintf("%d P0, %d P1, %d P2 open", answer.GetFindingsP0(), answer.GetFindingsP1(),
					answer.GetFindingsP2())},
				{"EVENTS", fmt.Sprintf("at %d, %d behind, %d parked", answer.GetPosition(), answer.GetEventsBehind(),
					answer.GetParkedEvents())},
				{"ERA", number(answer.GetEra())},
				{"VERSION", answer.GetVersion()},
			}, historyLines(answer.GetHistory()), wrong.lines()))
		}),
	}
}

var componentColumns = []column[*readmodelv1.ComponentStatus]{
	{title: "PART", path: "name"},
	{title: "STATE", of: func(_ *printer, c *readmodelv1.ComponentStatus) string {
		switch {
		case c.GetState() != commonv1.PartState_PART_STATE_UNSPECIFIED:
			return names.Of(c.GetState())
		case c.GetOk(): // an older server
			return "ok"
		default:
			return "down"
		}
	}},
	{title: "SEVERITY", drop: 1, of: func(_ *printer, c *readmodelv1.ComponentStatus) string {
		if c.GetSeverity() == commonv1.Severity_SEVERITY_UNSPECIFIED {
			return ""
		}
		return names.Of(c.GetSeverity())
	}},
	{title: "SINCE", drop: 3, moves: true, path: "since"},
	{title: "DETAIL", text: true, path: "detail"},
	{title: "OBSERVED", moves: true, path: "observed_at", wide: true},
	{title: "REASON", path: "reason", wide: true},
	{title: "NEXT ACTION", drop: 2, text: true, path: "next_action"},
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

var reasonView = view[*readmodelv1.ReasonText]{
	name: (*readmodelv1.ReasonText).GetCode,
	columns: []column[*readmodelv1.ReasonText]{
		{title: "CODE", path: "code"},
		{title: "MEANING", text: true, path: "meaning"},
		{title: "IMPACT", path: "impact", wide: true},
		{title: "OWNER", path: "owner", wide: true},
		{title: "NEXT ACTION", drop: 1, path: "next_action"},
	},
}

func explainCommand(p *Program) *cobra.Command {
	reason := &cobra.Command{
		Use: "reason [CODE]", Short: "Explain a reason: what it means, whom it affects, who repairs it, what to do; without a code, all reasons",
		Example: "  gpuaas explain reason certificate_expired", Args: cobra.MaximumNArgs(1),
		ValidArgs: reasonCodes(),
		RunE: p.local(func(_ context.Context, pr *printer, args []string) error {
			// Every build contains the catalogue, so that a refusal can be explained while the mesh cannot be reached.
			code := ""
			if len(args) > 0 {
				code = args[0]
			}
			var items []*readmodelv1.ReasonText
			for _, e := range fault.Explanations(code) {
				items = append(items, reasonText(e))
			}
			switch {
			case len(args) == 0:
				return list(pr, reasonView, items, "")
			case code == "" || len(items) == 0 || strings.EqualFold(code, names.Of(commonv1.Reason_REASON_UNSPECIFIED)):
				return fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("there is no reason %q", code),
					fault.Remedy("list all with `gpuaas explain reason`"))
			}
			return one(pr, reasonView, items[0])
		}),
	}
	return group("explain", "Explain reason codes", nil, reason)
}

// reasonCodes returns the codes of all reasons that can be explained.
func reasonCodes() []string {
	var out []string
	for _, e := range fault.Explanations("") {
		out = append(out, e.Code)
	}
	return out
}

func reasonText(e fault.Explanation) *readmodelv1.ReasonText {
	return &readmodelv1.ReasonText{
		Code: e.Code, Meaning: e.Meaning, Impact: e.Impact, Owner: e.Owner,
		NextAction: e.NextAction, Action: e.Action,
	}
}

// shownContext is a context without its secrets.
type shownContext struct {
	Current     bool   `json:"current"`
	Name        string `json:"name"`
	Server      string `json:"server"`
	TrustDomain string `json:"trust_domain"`
	CA          string `json:"ca"`
	Token       string `json:"token"`
}

func configCommand(p *Program) *cobra.Command {
	show := &cobra.Command{
		Use: "view", Short: "Show the contexts without their secrets", Example: "  gpuaas config view -o json", Args: args(),
		RunE: p.local(func(_ context.Context, pr *printer, _ []string) error {
			path, err := contexts.DefaultPath()
			if err != nil {
				return Usage(err)
			}
			file, err := contexts.Load(path)
			if err != nil {
				return Usage(err)
			}
			items := make([]shownContext, 0, len(file.Contexts))
			for _, c := range file.Contexts {
				items = append(items, shownContext{
					Current: c.Name == file.Current, Name: c.Name, Server: c.Server,
					TrustDomain: cmp.Or(c.TrustDomain, contexts.DefaultTrustDomain),
					CA:          cmp.Or(c.CAFile, onlyIf(c.CAPEM != "", "in the context")),
					Token:       cmp.Or(c.TokenFile, onlyIf(c.Token != "", "[hidden]")),
				})
			}
			switch {
			case pr.format == formatName:
				for _, c := range items {
					if err := pr.line(clean(c.Name)); err != nil {
						return err
					}
				}
				return nil
			case pr.structured():
				return pr.document(members(with("items", items), with("next_page_token", ""), with("current", file.Current),
					with("path", path)))
			}
			return table(pr, contextColumns, items)
		}),
	}
	use := &cobra.Command{
		Use: "use-context NAME", Short: "Choose the mesh that commands talk to", Example: "  gpuaas config use-context dev",
		Args:              args("NAME"),
		ValidArgsFunction: onlyFirst(p.completeContexts),
		RunE: p.local(func(_ context.Context, pr *printer, args []string) error {
			path, err := contexts.DefaultPath()
			if err != nil {
				return Usage(err)
			}
			file, err := contexts.Load(path)
			if err != nil {
				return Usage(err)
			}
			if _, err := file.Get(args[0]); err != nil {
				return noContext(args[0])
			}
			if err := contexts.Use(path, args[0]); err != nil {
				return err
			}
			note(pr.err, "commands go to the context %q now", args[0])
			return nil
		}),
	}
	return group("config", "Contexts: which mesh to talk to, and as whom", nil, show, use)
}

var contextColumns = []column[shownContext]{
	{title: "CURRENT", of: func(_ *printer, c shownContext) string { return onlyIf(c.Current, "*") }},
	{title: "NAME", of: func(_ *printer, c shownContext) string { return c.Name }},
	{title: "SERVER", drop: 1, of: func(_ *printer, c shownContext) string { return c.Server }},
	{title: "TRUST DOMAIN", drop: 2, of: func(_ *printer, c shownContext) string { return c.TrustDomain }},
	{title: "AUTHORITY", wide: true, of: func(_ *printer, c shownContext) string { return c.CA }},
	{title: "TOKEN", wide: true, of: func(_ *printer, c shownContext) string { return c.Token }},
}
