package client

import (
	"context"
	"fmt"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/spf13/cobra"
)

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
