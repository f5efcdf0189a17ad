package controlplane

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// ReasonView is how reasons are printed.
var ReasonView = output.View[*readmodelv1.ReasonText]{
	Name: (*readmodelv1.ReasonText).GetCode,
	Columns: []output.Column[*readmodelv1.ReasonText]{
		{Title: "CODE", Path: "code"},
		{Title: "MEANING", Text: true, Path: "meaning"},
		{Title: "IMPACT", Path: "impact", Wide: true},
		{Title: "OWNER", Path: "owner", Wide: true},
		{Title: "NEXT ACTION", Drop: 1, Path: "next_action"},
	},
}

// ExplainCommand returns the command that explains reasons.
func ExplainCommand(p *kit.Program) *cobra.Command {
	reason := &cobra.Command{
		Use: "reason [CODE]", Short: "Explain a reason: what it means, whom it affects, who repairs it, what to do; " +
			"without a code, all reasons",
		Example: "  gpuaas explain reason certificate_expired", Args: kit.ArgsFrom(0, "CODE"),
		ValidArgs: reasonCodes(),
		RunE: p.Local(func(_ context.Context, pr *output.Printer, args []string) error {
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
				return output.List(pr, ReasonView, items, "")
			case code == "" || len(items) == 0 || strings.EqualFold(code, names.Of(commonv1.Reason_REASON_UNSPECIFIED)):
				return unknownReason(code)
			}
			return output.One(pr, ReasonView, items[0], output.With("runbook", fault.Runbook(items[0].GetCode())))
		}),
	}
	group := kit.Group("explain", "Explain reason codes", nil, reason)
	group.Args = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0:
			return nil
		case len(fault.Explanations(args[0])) > 0:
			return exit.Usage(fmt.Errorf("explain: did you mean `gpuaas explain reason %s`?", args[0]))
		}
		return kit.UnknownCommand(cmd, args[0])
	}
	return group
}

// unknownReason returns the error for a code that no reason has, with the codes that are most like it.
func unknownReason(code string) error {
	remedy := "list all with `gpuaas explain reason`"
	if near := fault.Near(code); len(near) > 0 {
		remedy = "did you mean " + strings.Join(near, ", ") + "? Else " + remedy
	}
	return fault.New(commonv1.Reason_REASON_NOT_FOUND, fmt.Sprintf("there is no reason %q", code), fault.Remedy(remedy))
}

// reasonCodes returns the codes of all reasons that can be explained.
func reasonCodes() []string {
	return kit.TextsOf(fault.Explanations(""), func(e fault.Explanation) string { return e.Code })
}

func reasonText(e fault.Explanation) *readmodelv1.ReasonText {
	return &readmodelv1.ReasonText{
		Code: e.Code, Meaning: e.Meaning, Impact: e.Impact, Owner: e.Owner,
		NextAction: e.NextAction, Action: e.Action,
	}
}
