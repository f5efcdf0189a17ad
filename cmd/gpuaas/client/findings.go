package client

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/structpb"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var findingView = view[*lifecyclev1.Finding]{
	name: (*lifecyclev1.Finding).GetFindingId,
	columns: []column[*lifecyclev1.Finding]{
		{"SEVERITY", false, func(_ *printer, f *lifecyclev1.Finding) string { return word(f.GetSeverity()) }},
		{"KIND", false, func(_ *printer, f *lifecyclev1.Finding) string { return word(f.GetKind()) }},
		{"SUBJECT", false, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetSubjectType() + " " + f.GetSubjectId() }},
		{"FIRST SEEN", false, func(pr *printer, f *lifecyclev1.Finding) string { return pr.when(f.GetFirstSeenAt()) }},
		{"TIMES", false, func(_ *printer, f *lifecyclev1.Finding) string { return number(f.GetCount()) }},
		{"STATE", false, func(_ *printer, f *lifecyclev1.Finding) string { return findingState(f) }},
		{"SUMMARY", false, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetSummary() }},
		{"ID", true, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetFindingId() }},
		{"WORKSPACE", true, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetWorkspaceId() }},
		{"NODE", true, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetNodeId() }},
		{"LAST SEEN", true, func(pr *printer, f *lifecyclev1.Finding) string { return pr.when(f.GetLastSeenAt()) }},
		{"BEFORE", true, func(_ *printer, f *lifecyclev1.Finding) string { return evidence(f.GetBefore()) }},
		{"AFTER", true, func(_ *printer, f *lifecyclev1.Finding) string { return evidence(f.GetAfter()) }},
		{"NEXT ACTION", true, func(_ *printer, f *lifecyclev1.Finding) string { return f.GetNextAction() }},
	},
}

func findingState(f *lifecyclev1.Finding) string {
	if f.GetResolvedAt() != nil {
		return "resolved"
	}
	return "open" + onlyIf(f.GetCordoned(), ", node cordoned")
}

// evidence spells one side of a finding in a line, fields in order.
func evidence(s *structpb.Struct) string {
	fields := s.AsMap()
	parts := make([]string, 0, len(fields))
	for k, v := range fields {
		raw, err := json.Marshal(v)
		if err != nil {
			raw = []byte("?")
		}
		parts = append(parts, k+"="+strings.Trim(string(raw), `"`))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// findingLines are the open findings of a workspace as its own page shows them, each with what to do.
func findingLines(found []*lifecyclev1.Finding) string {
	lines := make([]string, 0, len(found))
	for _, f := range found {
		lines = append(lines, fmt.Sprintf("%s %s: %s; %s", word(f.GetSeverity()), word(f.GetKind()), f.GetSummary(), f.GetNextAction()))
	}
	return strings.Join(lines, "\n")
}

func (p *Program) findingsCommand() *cobra.Command {
	var page paging
	req := &readmodelv1.ListFindingsRequest{}
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List what the sweeps found: contradictions between rows and resources, and rows changed by hand",
		Example: "  gpuaas findings list\n  gpuaas findings list --all -o json\n  gpuaas findings list --workspace acme/demo2 -o wide", Args: args(),
		RunE: p.run(func(ctx context.Context, s *session, _ []string) error {
			items, next, err := pages(page.limit, page.token, func(size int32, token string) ([]*lifecyclev1.Finding, string, error) {
				req.PageSize, req.PageToken = size, token
				answer, err := s.client.Findings.ListFindings(ctx, req)
				return answer.GetItems(), answer.GetNextPageToken(), err
			})
			if err != nil {
				return err
			}
			return list(s.printer, findingView, items, next)
		}),
	}
	page.flags(ls)
	ls.Flags().BoolVar(&req.IncludeResolved, "all", false, "those that are over as well")
	ls.Flags().StringVar(&req.Workspace, "workspace", "", "only those of this workspace")
	_ = ls.RegisterFlagCompletionFunc("workspace", p.completeWorkspaces)
	return group("findings", "What contradicts itself, and rows changed behind their saga's back", []string{"finding"}, ls)
}
