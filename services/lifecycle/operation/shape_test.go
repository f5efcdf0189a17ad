package operation

import (
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// TestTheShapeOfWorkloadsIsCheckedAtTheRequest: an agent would refuse them all, after an instance, storage and a schema
// were made.
func TestTheShapeOfWorkloadsIsCheckedAtTheRequest(t *testing.T) {
	b := newBed(t, nil)
	b.tenant("acme")
	for _, tc := range []struct {
		name string
		in   *nodev1.Workload
		want string
	}{
		{
			name: "no name", in: &nodev1.Workload{Command: []string{"x"}, Env: map[string]string{"": "1"}},
			want: "workloads[main].env has a variable without a name",
		},
		{
			name: "malformed", in: &nodev1.Workload{Command: []string{"x"}, Env: map[string]string{"A-B": "1"}},
			want: `workloads[main].env["A-B"] is malformed`,
		},
		{
			name: "forbidden", in: &nodev1.Workload{Command: []string{"x"}, Env: map[string]string{"LD_PRELOAD": "1"}},
			want: "workloads[main].env.LD_PRELOAD is forbidden",
		},
		{
			name: "reserved", in: &nodev1.Workload{Command: []string{"x"}, Env: map[string]string{"DATABASE_URL": "1"}},
			want: "workloads[main].env.DATABASE_URL is reserved",
		},
		{
			name: "blank command", in: &nodev1.Workload{Command: []string{""}},
			want: "workloads[main].command[0] names no program",
		},
		{name: "NUL", in: &nodev1.Workload{Command: []string{"x", "a\x00"}}, want: "workloads[main].command[1] holds a NUL"},
	} {
		for _, dry := range []bool{true, false} {
			tc.in.Name = "main"
			_, err := b.server.RequestOperation(t.Context(), &lifecyclev1.RequestOperationRequest{
				Kind: commonv1.OperationKind_OPERATION_KIND_CREATE, DryRun: dry,
				Target: &lifecyclev1.RequestOperationRequest_Create{Create: &lifecyclev1.CreateWorkspace{
					Tenant: "acme", Name: "demo", Spec: &lifecyclev1.WorkspaceSpec{Workloads: []*nodev1.Workload{tc.in}},
				}},
			})
			f, _ := fault.As(err)
			if f == nil || f.Reason != commonv1.Reason_REASON_INVALID_ARGUMENT || !strings.Contains(f.Public, tc.want) {
				t.Errorf("%s (dry run %t): %v, want %q", tc.name, dry, err, tc.want)
			}
		}
	}
	if n := b.count(`SELECT count(*) FROM lifecycle.workspace`); n != 0 {
		t.Errorf("%d workspaces were made", n)
	}
}
