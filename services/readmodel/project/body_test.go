package project_test

import (
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/project/projecttest"
	"github.com/gpuaas/mesh/services/readmodel/project/rowbody"
)

// TestFieldsOfALaterBuildAreKept checks that a row keeps the fields which the projecting build does not know, also
// within another message: a later build that reads the row has them.
func TestFieldsOfALaterBuildAreKept(t *testing.T) {
	testkit.IO(t)
	l := projecttest.New(t)
	later := protowire.AppendString(protowire.AppendTag(nil, 4000, protowire.BytesType), "of a later build")
	w := &lifecyclev1.Workspace{
		WorkspaceId: ids.New(), TenantId: ids.New(), Name: "w", State: commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE,
		Spec: &lifecyclev1.WorkspaceSpec{StorageBytes: 7},
	}
	w.GetSpec().ProtoReflect().SetUnknown(later)
	l.Put(w)
	must(t, l.Projector().Drain(testkit.Context(t)))
	got := &lifecyclev1.Workspace{}
	must(t, rowbody.Decode([]byte(text(t, l, `SELECT body::text FROM readmodel.workspace`)), got))
	if got.GetName() != "w" || got.GetSpec().GetStorageBytes() != 7 ||
		string(got.GetSpec().ProtoReflect().GetUnknown()) != string(later) {
		t.Errorf("the row has %v", got)
	}
	// A value that equals the name of the field is not taken for the field.
	w = &lifecyclev1.Workspace{WorkspaceId: ids.New(), TenantId: w.GetTenantId(), Name: `"@whole"`, State: w.GetState()}
	l.Put(w)
	must(t, l.Projector().Drain(testkit.Context(t)))
	got = &lifecyclev1.Workspace{}
	must(t, rowbody.Decode([]byte(text(t, l, `SELECT body::text FROM readmodel.workspace WHERE name LIKE '%whole%'`)),
		got))
	if !proto.Equal(got, &lifecyclev1.Workspace{
		WorkspaceId: w.GetWorkspaceId(), TenantId: w.GetTenantId(),
		Name: w.GetName(), State: w.GetState(), Version: got.GetVersion(),
	}) {
		t.Errorf("the row has %v", got)
	}
}
