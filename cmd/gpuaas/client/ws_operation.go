package client

import (
	"context"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

var operationView = view[*lifecyclev1.Operation]{
	name: (*lifecyclev1.Operation).GetOperationId,
	columns: []column[*lifecyclev1.Operation]{
		{title: "OPERATION", path: "operation_id"},
		{title: "KIND", path: "kind"},
		{title: "JOINED", path: "joined", as: trueFalse},
		{title: "WORKSPACE", path: "workspace_id"},
		{title: "EPOCH", path: "epoch"},
		{title: "STATE", path: "state"},
	},
	more: []column[*lifecyclev1.Operation]{
		{title: "REPLAYED", path: "replayed", as: trueOnly},
		{title: "ADVICE", path: "advice"},
	},
}

// dryRunView prints what an operation would do. It has no operation id, because no operation was begun.
var dryRunView = view[*lifecyclev1.Operation]{
	name: func(o *lifecyclev1.Operation) string { return verb(o.GetKind()) },
	columns: []column[*lifecyclev1.Operation]{
		{title: "DRY RUN", path: "kind", as: dashed},
		{title: "WORKSPACE", path: "workspace_id"},
		{title: "WOULD DO", path: "consequence"},
	},
}

// printOperation prints the answer to a command: the operation that it began or joined, or what it would do. name is the
// full name of the workspace; if it is empty, printOperation reads it from the mesh.
func printOperation(ctx context.Context, s *session, o *lifecyclev1.Operation, name string) error {
	if s.structured() || s.format == formatName {
		if o.GetDryRun() && !s.structured() {
			return one(s.printer, dryRunView, o)
		}
		return one(s.printer, operationView, o)
	}
	if name == "" && o.GetWorkspaceId() != "" {
		// A person who may operate and not read sees only the id.
		if answer, err := s.query.GetWorkspace(ctx,
			&readmodelv1.GetWorkspaceRequest{Workspace: o.GetWorkspaceId()}); err == nil {
			name = fullName(answer.GetWorkspace())
		}
	}
	if !o.GetDryRun() {
		return one(s.printer, withWorkspace(operationView, name), o)
	}
	note(s.err, "dry run: nothing was changed")
	return one(s.printer, withWorkspace(dryRunView, name), o)
}

// withWorkspace returns a view of operations that prints the workspace's name and the end of its id.
func withWorkspace(v view[*lifecyclev1.Operation], name string) view[*lifecyclev1.Operation] {
	if name == "" {
		return v
	}
	v.columns = slices.Clone(v.columns)
	for i, c := range v.columns {
		if c.path != "workspace_id" {
			continue
		}
		v.columns[i].of = func(_ *printer, o *lifecyclev1.Operation) string {
			return name + onlyIf(o.GetWorkspaceId() != "", " ("+shorten([]string{o.GetWorkspaceId()})[0]+")")
		}
	}
	return v
}

// verb returns the name of the command for a kind of operation.
func verb(kind commonv1.OperationKind) string { return strings.ReplaceAll(enumText(kind), "_", "-") }
