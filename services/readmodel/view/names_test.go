package view_test

import (
	"context"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// TestNamesStandBesideIDs: an object with the id of a workspace or of a node has its name as well, and no scope gets
// the name of another tenant's object.
func TestNamesStandBesideIDs(t *testing.T) {
	k := newKit(t)
	// Rows of one tenant that point at another's workspace and node, as no row should.
	strayed, strayedTask := ids.New(), ids.New()
	k.Append(&lifecyclev1.Instance{
		InstanceId: strayed, WorkspaceId: k.B.WorkspaceID, WorkspaceName: "x", TenantId: k.A.ID,
		NodeId: k.B.NodeID,
	})
	k.Append(&lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
		TaskId: strayedTask, WorkspaceId: k.B.WorkspaceID, TenantId: k.A.ID, NodeId: k.B.NodeID,
		State: commonv1.TaskState_TASK_STATE_RUNNING,
	}})
	k.sync()
	type names struct{ workspace, node string }
	read := func(scope list.Scope) map[string]names {
		found := map[string]names{}
		err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
			instances, _, err := s.Instances(ctx, view.PerWorkspaceFilter{}, list.Page{})
			if err != nil {
				return err
			}
			for _, i := range instances {
				found[i.GetInstanceId()] = names{i.GetWorkspace(), i.GetNodeName()}
			}
			claims, _, err := s.Claims(ctx, view.PerWorkspaceFilter{}, list.Page{})
			if err != nil {
				return err
			}
			for _, c := range claims {
				found[c.GetClaimId()] = names{c.GetWorkspace(), c.GetNodeName()}
			}
			allocations, _, err := s.Allocations(ctx, view.PerWorkspaceFilter{}, list.Page{})
			if err != nil {
				return err
			}
			for _, a := range allocations {
				found[a.GetAllocationId()] = names{a.GetWorkspace(), a.GetNodeName()}
			}
			tasks, _, err := s.Tasks(ctx, view.TaskFilter{}, list.Page{})
			if err != nil {
				return err
			}
			for _, task := range tasks {
				found[task.GetTaskId()] = names{task.GetWorkspace(), task.GetNodeName()}
			}
			nodes, _, err := s.Nodes(ctx, view.NodeFilter{}, list.Page{})
			if err != nil && (scope.Everything() || !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED)) {
				return err
			}
			for _, n := range nodes {
				found[n.GetNodeId()] = names{n.GetWorkspace(), n.GetName()}
			}
			resolved, err := s.Resolve(ctx, strayed, []readmodelv1.ObjectKind{readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE})
			if resolved.GetName() != "" {
				t.Errorf("a strayed instance is resolved as %v", resolved)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	of := map[string]names{
		k.A.InstanceID: {"alpha/" + k.A.WorkspaceName, k.A.NodeName}, k.A.ClaimID: {"alpha/" + k.A.WorkspaceName, ""},
		k.A.AllocationID: {"alpha/" + k.A.WorkspaceName, k.A.NodeName},
		k.A.TaskID:       {"alpha/" + k.A.WorkspaceName, k.A.NodeName},
		k.A.NodeID:       {"alpha/" + k.A.WorkspaceName, k.A.NodeName}, strayed: {"beta/" + k.B.WorkspaceName, k.B.NodeName},
		strayedTask: {"beta/" + k.B.WorkspaceName, k.B.NodeName}, k.Shared: {"", "shared"},
	}
	all := read(list.All())
	for id, want := range of {
		if all[id] != want {
			t.Errorf("%s: %+v, want %+v", id, all[id], want)
		}
	}
	own := read(scopeOf(t, k.A.ID))
	delete(of, k.Shared) // a person of a tenant sees no nodes, nor their names
	delete(of, k.A.NodeID)
	for id, want := range of {
		of[id] = names{want.workspace, ""}
	}
	of[strayed], of[strayedTask] = names{}, names{}
	for id, want := range of {
		if own[id] != want {
			t.Errorf("of one's own %s: %+v, want %+v", id, own[id], want)
		}
	}
}

// TestFindingsNameTheirSubjects: an operator gets the names of a finding's subjects, if they have any.
func TestFindingsNameTheirSubjects(t *testing.T) {
	k := newKit(t)
	err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
		found, _, err := s.Findings(ctx, view.FindingFilter{WorkspaceID: k.A.WorkspaceID}, list.Page{})
		if err == nil && (len(found) != 1 || found[0].GetWorkspace() != "alpha/"+k.A.WorkspaceName) {
			t.Errorf("findings: %v", found)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
