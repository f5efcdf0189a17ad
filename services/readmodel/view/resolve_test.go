package view_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

func (k *kit) resolve(scope list.Scope, ref string, kinds ...readmodelv1.ObjectKind) (*readmodelv1.ResolveResponse,
	error,
) {
	k.t.Helper()
	var found *readmodelv1.ResolveResponse
	err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
		var err error
		found, err = s.Resolve(ctx, ref, kinds)
		return err
	})
	return found, err
}

// TestPartsOfIDs: every kind of object is found by its id in any spelling, and by digits from its beginning and its
// end.
func TestPartsOfIDs(t *testing.T) {
	k := newKit(t)
	// Ids that were made at other times than everything else here.
	workspace, node, task := "0192f0c1-0000-7000-8000-0000000000aa", "0192f0c2-0000-7000-8000-0000000000ab",
		"0192f0c3-0000-7000-8000-0000000000ac"
	k.Append(&lifecyclev1.Workspace{
		WorkspaceId: workspace, TenantId: k.A.ID, Tenant: "alpha", Name: "parts",
		State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE, NodeId: node,
	})
	k.Append(&lifecyclev1.TaskChanged{Task: &lifecyclev1.Task{
		TaskId: task, NodeId: k.A.NodeID,
		State: commonv1.TaskState_TASK_STATE_QUEUED,
	}})
	k.sync()
	byID := map[readmodelv1.ObjectKind]string{
		readmodelv1.ObjectKind_OBJECT_KIND_NODE: k.A.NodeID, readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE: k.A.WorkspaceID,
		readmodelv1.ObjectKind_OBJECT_KIND_TASK: k.A.TaskID, readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION: k.A.AllocationID,
		readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE: k.A.InstanceID, readmodelv1.ObjectKind_OBJECT_KIND_CLAIM: k.A.ClaimID,
		readmodelv1.ObjectKind_OBJECT_KIND_RUN: k.A.RunID, readmodelv1.ObjectKind_OBJECT_KIND_TENANT: k.A.ID,
	}
	for kind, id := range byID {
		for _, ref := range []string{
			id, strings.ToUpper(id), strings.ReplaceAll(id, "-", ""), id[len(id)-8:],
			strings.ToUpper(id[len(id)-12:]), id[:35],
		} {
			if got, err := k.resolve(list.All(), ref, kind); err != nil || got.GetId() != id || got.GetKind() != kind {
				t.Errorf("%s %s: %v, %v", kind, ref, got, err)
			}
		}
	}
	for ref, want := range map[string]string{
		"0192f0c1": workspace, "0192F0C1-0000": workspace, "0000aa": workspace, "192f0c3": "", "0192f0c3": task,
		"parts": workspace, "alpha/parts": workspace, k.A.NodeName: k.A.NodeID, "0192f": "", "00aa": "", "nobody": "",
		"0192f0c10": workspace, "0192f0c11": "",
	} {
		if got, err := k.resolve(list.All(), ref); got.GetId() != want ||
			(want == "") != fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	if w, err := k.workspace(list.All(), "0000aa"); err != nil || w.GetWorkspaceId() != workspace {
		t.Errorf("a workspace by the end of its id: %v, %v", w, err)
	}
	if n, err := k.node(k.A.NodeID[24:]); err != nil || n.GetNodeId() != k.A.NodeID {
		t.Errorf("a node by the end of its id: %v, %v", n, err)
	}
	for _, ref := range []string{"alpha", k.A.ID, k.A.ID[24:], strings.ToUpper(k.A.ID[26:])} {
		if got, err := k.resolve(list.All(), ref, readmodelv1.ObjectKind_OBJECT_KIND_TENANT); err != nil ||
			got.GetId() != k.A.ID || got.GetName() != "alpha" {
			t.Errorf("tenant %s: %v, %v", ref, got, err)
		}
		err := k.read(list.All(), func(ctx context.Context, s *view.Snapshot) error {
			found, err := s.Tenant(ctx, ref)
			if err == nil && found.GetTenantId() != k.A.ID {
				t.Errorf("tenant %s: %v", ref, found)
			}
			return err
		})
		if err != nil {
			t.Errorf("tenant %s: %v", ref, err)
		}
	}
	// A part that several objects have is refused with the list of them.
	_, err := k.resolve(list.All(), "0192f0")
	if want := []string{"task " + task + " " + k.A.NodeName, "workspace " + workspace + " alpha/parts"}; !fault.Has(err,
		commonv1.Reason_REASON_AMBIGUOUS) ||
		!slices.Equal(unmet(err), want) {
		t.Errorf("ambiguous: %v", err)
	}
}

// TestAmbiguousIsBounded: the refusal lists ten candidates, however many there are.
func TestAmbiguousIsBounded(t *testing.T) {
	k := newKit(t)
	for range 15 {
		k.Append(&lifecyclev1.Workspace{
			WorkspaceId: ids.New(), TenantId: k.A.ID, Tenant: "alpha", Name: ids.New(),
			State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		})
	}
	k.sync()
	_, err := k.resolve(list.All(), k.A.WorkspaceID[:6], readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE)
	if !fault.Has(err, commonv1.Reason_REASON_AMBIGUOUS) || len(unmet(err)) != 10 {
		t.Errorf("%v", err)
	}
}

// TestPartsStayWithinTheTenant: another tenant's ids are not found by any part, and do not make one's own ambiguous.
func TestPartsStayWithinTheTenant(t *testing.T) {
	k := newKit(t)
	scope := scopeOf(t, k.A.ID)
	// The ids of both tenants begin alike: they were made within the same hours.
	for _, ref := range []string{k.A.WorkspaceID[:6], k.A.WorkspaceID[24:]} {
		if got, err := k.resolve(scope, ref, readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE); err != nil ||
			got.GetId() != k.A.WorkspaceID {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	for _, ref := range []string{"alpha", k.A.ID, k.A.ID[24:]} {
		if got, err := k.resolve(scope, ref, readmodelv1.ObjectKind_OBJECT_KIND_TENANT); err != nil || got.GetId() != k.A.ID {
			t.Errorf("one's own tenant %s: %v, %v", ref, got, err)
		}
	}
	if _, err := k.resolve(scope, "beta"); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
		t.Errorf("another tenant by name: %v", err)
	}
	for _, id := range []string{k.B.ID, k.B.WorkspaceID, k.B.InstanceID, k.B.RunID, k.B.TaskID, k.B.NodeID, k.Shared} {
		for _, ref := range []string{id, id[24:], id[28:]} {
			if got, err := k.resolve(scope, ref); !fault.Has(err, commonv1.Reason_REASON_NOT_FOUND) {
				t.Errorf("%s: %v, %v", ref, got, err)
			}
		}
	}
	// A kind that a tenant's person may not list cannot be looked up either.
	for _, kind := range []readmodelv1.ObjectKind{
		readmodelv1.ObjectKind_OBJECT_KIND_TASK,
		readmodelv1.ObjectKind_OBJECT_KIND_INCIDENT, readmodelv1.ObjectKind_OBJECT_KIND_NODE,
	} {
		if _, err := k.resolve(scope, k.A.TaskID, kind); !fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED) {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
