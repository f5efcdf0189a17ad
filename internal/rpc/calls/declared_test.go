package calls_test

import (
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	_ "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
)

// reads are the names of methods that change nothing and do not compute for long.
var reads = regexp.MustCompile(`^(Get|List|Read|Explain|Resolve|WhoAmI)`)

// TestReadsAreTriedAgain checks which unary methods are declared idempotent, so that clients call them again if the
// server was not reached: each one that reads, and commands whose repetition is promised to be harmless.
func TestReadsAreTriedAgain(t *testing.T) {
	var commands []string
	for _, pkg := range []protoreflect.FullName{
		"gpuaas.common.v1", "gpuaas.lifecycle.v1", "gpuaas.recovery.v1", "gpuaas.readmodel.v1",
	} {
		protoregistry.GlobalFiles.RangeFilesByPackage(pkg, func(file protoreflect.FileDescriptor) bool {
			for i := range file.Services().Len() {
				methods := file.Services().Get(i).Methods()
				for j := range methods.Len() {
					method := methods.Get(j)
					options, _ := method.Options().(*descriptorpb.MethodOptions)
					again := options.GetIdempotencyLevel() == descriptorpb.MethodOptions_IDEMPOTENT
					read := reads.MatchString(string(method.Name())) && !method.IsStreamingServer()
					switch {
					case options.GetIdempotencyLevel() == descriptorpb.MethodOptions_NO_SIDE_EFFECTS:
						t.Errorf("%s would be served by GET too", method.FullName())
					case read && !again:
						t.Errorf("%s reads, and is not declared idempotent", method.FullName())
					case again && !read:
						commands = append(commands, string(method.FullName()))
					}
				}
			}
			return true
		})
	}
	slices.Sort(commands)
	want := []string{
		"gpuaas.lifecycle.v1.GateService.ApplyFence",
		"gpuaas.lifecycle.v1.WorkspaceService.CreateTenant",
		"gpuaas.readmodel.v1.CommandService.CreateTenant",
		"gpuaas.recovery.v1.InstanceService.PrepareInstance",
		"gpuaas.recovery.v1.InstanceService.RetireInstance",
	}
	if diff := cmp.Diff(want, commands); diff != "" {
		t.Errorf("commands that are tried again (-want +got):\n%s", diff)
	}
}
