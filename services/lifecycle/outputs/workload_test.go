package outputs

import (
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/lifecycle/workspace"
)

func TestTheWorkloadIsNamedWhereThereAreSeveral(t *testing.T) {
	w := workspace.Row{Spec: []byte(`{"workloads": [{"name": "web"}, {"name": "job"}]}`)}
	if name, err := chosenWorkload(w, "job"); name != "job" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	_, err := chosenWorkload(w, "")
	if f, ok := fault.As(err); !ok || f.Public != "the workspace has 2 workloads: web, job" ||
		f.Remedy != "name one of them with --workload" {
		t.Errorf("of two: %v", err)
	}
	_, err = chosenWorkload(w, "none")
	if f, ok := fault.As(err); !ok || f.Reason != commonv1.Reason_REASON_NOT_FOUND ||
		f.Remedy != "its workloads are web, job" {
		t.Errorf("of another name: %v", err)
	}
}
