package operations

import (
	"context"
	"slices"
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/kit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// View is how an operation that was begun or joined is printed.
var View = output.View[*lifecyclev1.Operation]{
	Name: (*lifecyclev1.Operation).GetOperationId,
	Columns: []output.Column[*lifecyclev1.Operation]{
		{Title: "OPERATION", Path: "operation_id"},
		{Title: "KIND", Path: "kind"},
		{Title: "JOINED", Path: "joined", As: output.TrueFalse},
		{Title: "WORKSPACE", Path: "workspace_id"},
		{Title: "EPOCH", Path: "epoch"},
		{Title: "STATE", Path: "state"},
	},
	More: []output.Column[*lifecyclev1.Operation]{
		{Title: "REPLAYED", Path: "replayed", As: output.TrueOnly},
		{Title: "ADVICE", Path: "advice"},
	},
}

// DryRunView prints what an operation would do. It has no operation id, because no operation was begun.
var DryRunView = output.View[*lifecyclev1.Operation]{
	Name: func(o *lifecyclev1.Operation) string { return Verb(o.GetKind()) },
	Columns: []output.Column[*lifecyclev1.Operation]{
		{Title: "DRY RUN", Path: "kind", As: output.Dashed},
		{Title: "WORKSPACE", Path: "workspace_id"},
		{Title: "WOULD DO", Path: "consequence"},
	},
}

// Print prints the answer to a command: the operation that it began or joined, or what it would do. name is the full
// name of the workspace; if it is empty, Print reads it from the mesh.
func Print(ctx context.Context, s *kit.Session, o *lifecyclev1.Operation, name string) error {
	if s.Structured() || s.Format == output.FormatName {
		if o.GetDryRun() && !s.Structured() {
			return output.One(s.Printer, DryRunView, o)
		}
		return output.One(s.Printer, View, o)
	}
	if name == "" && o.GetWorkspaceId() != "" {
		// A person who may operate and not read sees only the id.
		if answer, err := s.Query.GetWorkspace(ctx,
			&readmodelv1.GetWorkspaceRequest{Workspace: o.GetWorkspaceId()}); err == nil {
			name = kit.FullName(answer.GetWorkspace())
		}
	}
	if !o.GetDryRun() {
		return output.One(s.Printer, withWorkspace(View, name), o)
	}
	human.Note(s.Err, "dry run: nothing was changed")
	return output.One(s.Printer, withWorkspace(DryRunView, name), o)
}

// withWorkspace returns a view of operations that prints the workspace's name and the end of its id.
func withWorkspace(v output.View[*lifecyclev1.Operation], name string) output.View[*lifecyclev1.Operation] {
	if name == "" {
		return v
	}
	v.Columns = slices.Clone(v.Columns)
	for i, c := range v.Columns {
		if c.Path != "workspace_id" {
			continue
		}
		v.Columns[i].Of = func(_ *output.Printer, o *lifecyclev1.Operation) string {
			return name + human.OnlyIf(o.GetWorkspaceId() != "", " ("+output.ShortIDs([]string{o.GetWorkspaceId()})[0]+")")
		}
	}
	return v
}

// Verb returns the name of the command for a kind of operation.
func Verb(kind commonv1.OperationKind) string { return strings.ReplaceAll(human.Enum(kind), "_", "-") }
