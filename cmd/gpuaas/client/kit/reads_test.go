package kit

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1" // registers the methods
)

// TestReadsAreKnown: each method of the people's API is known as a read or as a command.
func TestReadsAreKnown(t *testing.T) {
	var commands []string
	protoregistry.GlobalFiles.RangeFilesByPackage("gpuaas.readmodel.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				if name := string(methods.Get(j).Name()); !onlyReads("/a.Service/" + name) {
					commands = append(commands, name)
				}
			}
		}
		return true
	})
	slices.Sort(commands)
	want := []string{
		"AcceptHostFacts", "AcceptRollback", "AcknowledgeFinding", "ActivateProfile", "ChangeNodeIdentity", "ChangeTask",
		"CloseIncident", "CollectDiagnostics",
		"CreatePerson", "CreateTenant", "CreateWorkspace", "DropParked", "EndInstance", "EndPerson", "EnrollNode", "Escalate",
		"ExtendTokens", "ForceRelease", "ForgetConsumer", "IssueBundle", "MergeDiagnostics", "OperateWorkspace", "ProbeNode",
		"RebuildProjections", "ReleaseBrake", "RepairTrust", "ReplayParked", "RetireProfile", "RetryRelease", "RevokeTokens",
		"RotateAuthority", "RotateKey",
		"RunPreflight", "SetCordon", "SetPolicy", "SetProfile",
	}
	if diff := cmp.Diff(want, commands); diff != "" {
		t.Errorf("what is no read (-want +got):\n%s", diff)
	}
}
