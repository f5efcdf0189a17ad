package kit

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestReadsAreKnown: each method of the people's API is known as a read or as a command.
func TestReadsAreKnown(t *testing.T) {
	var commands []string
	for _, file := range []protoreflect.FileDescriptor{
		readmodelv1.File_gpuaas_readmodel_v1_readmodel_proto, readmodelv1.File_gpuaas_readmodel_v1_people_proto,
		readmodelv1.File_gpuaas_readmodel_v1_recover_proto, readmodelv1.File_gpuaas_readmodel_v1_rollback_proto,
		readmodelv1.File_gpuaas_readmodel_v1_keys_proto, readmodelv1.File_gpuaas_readmodel_v1_hostfacts_proto,
		readmodelv1.File_gpuaas_readmodel_v1_diagnostics_proto, readmodelv1.File_gpuaas_readmodel_v1_trust_proto,
		readmodelv1.File_gpuaas_readmodel_v1_rotation_proto,
		readmodelv1.File_gpuaas_readmodel_v1_tokens_proto, readmodelv1.File_gpuaas_readmodel_v1_events_proto,
		readmodelv1.File_gpuaas_readmodel_v1_actions_proto,
		readmodelv1.File_gpuaas_readmodel_v1_projections_proto, readmodelv1.File_gpuaas_readmodel_v1_retention_proto,
		readmodelv1.File_gpuaas_readmodel_v1_profiles_proto,
		readmodelv1.File_gpuaas_readmodel_v1_bundles_proto,
	} {
		for i := range file.Services().Len() {
			methods := file.Services().Get(i).Methods()
			for j := range methods.Len() {
				if name := string(methods.Get(j).Name()); !onlyReads("/a.Service/" + name) {
					commands = append(commands, name)
				}
			}
		}
	}
	slices.Sort(commands)
	want := []string{
		"AcceptHostFacts", "AcceptRollback", "AcknowledgeFinding", "ActivateProfile", "ChangeNodeIdentity", "ChangeTask",
		"CollectDiagnostics",
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
