package records

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// FindingView is how findings are printed.
var FindingView = output.View[*lifecyclev1.Finding]{
	Name: (*lifecyclev1.Finding).GetFindingId,
	Columns: []output.Column[*lifecyclev1.Finding]{
		{Title: "SEVERITY", Path: "severity"},
		{Title: "KIND", Path: "kind"},
		{Title: "SUBJECT", Drop: 1, ID: true, Path: "subject_type subject_id workspace node_name", As: output.Subject},
		{Title: "FIRST SEEN", Drop: 3, Moves: true, Path: "first_seen_at"},
		{Title: "TIMES", Drop: 4, Moves: true, Path: "count"},
		{Title: "STATE", Of: func(_ *output.Printer, f *lifecyclev1.Finding) string { return findingState(f) }},
		{Title: "SUMMARY", Text: true, Path: "summary"},
		{Title: "ID", ID: true, Path: "finding_id"},
		{Title: "WORKSPACE", Path: "workspace|workspace_id", Wide: true},
		{Title: "NODE", Path: "node_name|node_id", Wide: true},
		{Title: "LAST SEEN", Moves: true, Path: "last_seen_at", Wide: true},
		{Title: "BEFORE", Wide: true, Of: func(_ *output.Printer, f *lifecyclev1.Finding) string {
			return evidence(f.GetBefore())
		}},
		{Title: "AFTER", Wide: true, Of: func(_ *output.Printer, f *lifecyclev1.Finding) string {
			return evidence(f.GetAfter())
		}},
		{Title: "RESOLVED", Path: "resolved_at", Wide: true},
		{Title: "ACKNOWLEDGED", Wide: true, Of: func(_ *output.Printer, f *lifecyclev1.Finding) string {
			return human.OnlyIf(f.GetAcknowledgedBy() != "", "by "+f.GetAcknowledgedBy()+": "+f.GetAcknowledgeReason())
		}},
		{Title: "NEXT ACTION", Path: "next_action", Wide: true},
	},
	More: []output.Column[*lifecyclev1.Finding]{
		{
			Title: "DIFFERENCES", Wide: true,
			Of: func(_ *output.Printer, f *lifecyclev1.Finding) string { return differences(f) },
		},
		{Title: "CHANGED BY", Wide: true, Of: func(_ *output.Printer, f *lifecyclev1.Finding) string { return changes(f) }},
	},
}

// changesKey is the field of a finding's after that lists the manual changes one by one.
const changesKey = "changes"

// differences returns the fields of a finding that differ, one a line: before and after.
func differences(f *lifecyclev1.Finding) string {
	before, after := f.GetBefore().AsMap(), f.GetAfter().AsMap()
	var lines []string
	for _, k := range slices.Sorted(maps.Keys(after)) {
		if was, there := before[k]; there && (k != "version" || !reflect.DeepEqual(was, after[k])) {
			lines = append(lines, k+": "+value(was)+" -> "+value(after[k]))
		}
	}
	return strings.Join(lines, "\n")
}

// changes returns the manual changes of a row, one a line.
func changes(f *lifecyclev1.Finding) string {
	var lines []string
	for _, v := range f.GetAfter().GetFields()[changesKey].GetListValue().GetValues() {
		one := v.GetStructValue().AsMap()
		if n, left := one["left_out"]; left {
			lines = append(lines, value(n)+" more")
			continue
		}
		line := fmt.Sprintf("%s %s", value(one["at"]), value(one["how"]))
		if by, known := one["by"]; known {
			line += fmt.Sprintf(" by %s with %s from %s, backend %s, transaction %s", value(by), value(one["application"]),
				value(one["client"]), value(one["backend"]),
				value(one["transaction"]))
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// value returns one value of evidence as JSON.
func value(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return "?"
	}
	return strings.Trim(string(raw), `"`)
}

func findingState(f *lifecyclev1.Finding) string {
	switch {
	case f.GetAcknowledgedBy() != "":
		return "acknowledged"
	case f.GetResolvedAt() != nil:
		return "resolved"
	}
	return "open" + human.OnlyIf(f.GetCordoned(), ", node cordoned")
}

// evidence returns one side of a finding in a line, its fields in order. Manual changes are left out, because they have
// lines of their own.
func evidence(s *structpb.Struct) string {
	fields := s.AsMap()
	parts := make([]string, 0, len(fields))
	for k, v := range fields {
		if k != changesKey {
			parts = append(parts, k+"="+value(v))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// FindingLines returns the lines for the open findings of a workspace in its details, each with what to do.
func FindingLines(found []*lifecyclev1.Finding) string {
	return strings.Join(kit.TextsOf(found, func(f *lifecyclev1.Finding) string {
		return fmt.Sprintf("%s %s: %s; %s", human.Enum(f.GetSeverity()), human.Enum(f.GetKind()), f.GetSummary(),
			f.GetNextAction())
	}), "\n")
}

// FindingsCommand returns the commands about findings.
func FindingsCommand(p *kit.Program) *cobra.Command {
	var page kit.Paging
	req := &readmodelv1.ListFindingsRequest{}
	ls := &cobra.Command{
		Use: "list", Aliases: []string{"ls"},
		Short: "List what the sweeps found: contradictions between rows and resources, and rows changed by hand",
		Example: "  gpuaas findings list\n  gpuaas findings list --all -o json\n  gpuaas findings list --workspace " +
			"acme/demo2 -o wide", Args: kit.Args(),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, _ []string) error {
			return kit.Show(ctx, s, page, kit.Source[*lifecyclev1.Finding]{
				View:  FindingView,
				Fetch: kit.Method(s.Client.Findings.ListFindings, req),
			})
		}),
	}
	page.Flags(ls)
	ls.Flags().BoolVar(&req.IncludeResolved, "all", false, "those that are over as well")
	p.WorkspaceFlag(ls, &req.Workspace)
	return kit.Group("findings", "Contradictions between records, and rows that were changed by hand", []string{"finding"},
		ls,
		getFindingCommand(p), acknowledgeCommand(p))
}

func getFindingCommand(p *kit.Program) *cobra.Command {
	return &cobra.Command{
		Use: "get FINDING", Short: "Show one finding, open or over, with what was before and after, by whom, and what to do",
		Example: "  gpuaas findings get 0192f0c1-0000-7000-8000-000000000001", Args: kit.Args("FINDING"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			id, err := s.ID(ctx, kit.KindFinding, args[0])
			if err != nil {
				return err
			}
			return kit.Get(ctx, s, FindingView, s.Client.Findings.GetFinding, &readmodelv1.GetFindingRequest{FindingId: id},
				(*readmodelv1.GetFindingResponse).GetFinding)
		}),
	}
}

func acknowledgeCommand(p *kit.Program) *cobra.Command {
	req := &lifecyclev1.AcknowledgeFindingRequest{}
	cmd := &cobra.Command{
		Use: "acknowledge FINDING", Aliases: []string{"ack"},
		Short: "Say that a row changed by hand was looked at; refused while the row stands as it was changed",
		Example: "  gpuaas findings acknowledge 0192f0c1-0000-7000-8000-000000000001 --reason 'the state was set by the " +
			"runbook of 12 May'", Args: kit.Args("FINDING"),
		RunE: p.Run(func(ctx context.Context, s *kit.Session, args []string) error {
			var err error
			if req.FindingId, err = s.ID(ctx, kit.KindFinding, args[0]); err != nil {
				return err
			}
			answer, err := s.Client.Findings.AcknowledgeFinding(ctx, &readmodelv1.AcknowledgeFindingRequest{Request: req})
			if err != nil {
				return err
			}
			return output.One(s.Printer, FindingView, answer.GetResponse().GetFinding())
		}),
	}
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why, for the audit log")
	return cmd
}
