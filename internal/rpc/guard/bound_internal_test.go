package guard

import (
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	_ "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/rpc"
)

// TestNoRoleMakesAPersonOfATenantAnOperator: methods for operators or security alone concern the fleet.
func TestNoRoleMakesAPersonOfATenantAnOperator(t *testing.T) {
	all := []string{"operator", "security", "tenant", "viewer"}
	refused := map[string]bool{}
	for _, owner := range []protoreflect.FullName{"gpuaas.lifecycle.v1", "gpuaas.recovery.v1", "gpuaas.readmodel.v1"} {
		protoregistry.GlobalFiles.RangeFilesByPackage(owner, func(file protoreflect.FileDescriptor) bool {
			set, err := rpc.Policies(file)
			if err != nil {
				t.Fatal(err)
			}
			for procedure, policy := range set {
				if len(policy.Roles) == 0 {
					continue
				}
				if err := checkRoles(policy, rpc.Person{Subject: "olga", Roles: all}); err != nil {
					t.Errorf("%s refuses the operator: %v", procedure, err)
				}
				fleet := !slices.ContainsFunc(policy.Roles, func(role string) bool { return role == "tenant" || role == "viewer" })
				err := checkRoles(policy, rpc.Person{Subject: "bea", TenantID: "acme", Roles: all})
				if denied := fault.Has(err, commonv1.Reason_REASON_PERMISSION_DENIED); denied != fleet {
					t.Errorf("%s, of roles %v, answers a person of a tenant: %v", procedure, policy.Roles, err)
				} else if denied {
					refused[procedure[strings.LastIndexByte(procedure, '/')+1:]] = true
				}
			}
			return true
		})
	}
	for _, verb := range []string{
		"ForceRelease", "RetryRelease", "EndInstance", "SetCordon", "ChangeIdentity", "IssueBootstrap", "SetPolicy",
		"AcceptRollback", "ReleaseBrake", "CloseIncident", "ChangeTask", "EnqueueProbe", "AcknowledgeFinding", "CreateTenant",
	} {
		if !refused[verb] {
			t.Errorf("%s does not refuse a person of a tenant", verb)
		}
	}
}
