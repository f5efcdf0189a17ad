package agents_test

import (
	"fmt"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/nodeapi/session/bounds"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// TestRecoveryComparesAllFactsThatPass checks that recovery cuts nothing of the facts that nodeapi lets pass, which
// counts what it cuts.
func TestRecoveryComparesAllFactsThatPass(t *testing.T) {
	facts := &commonv1.HostFacts{Kernel: strings.Repeat("k", 200), ContainerRuntime: strings.Repeat("c", 200)}
	for i := range 500 {
		facts.Gpus = append(facts.Gpus, &commonv1.Gpu{
			Index: int32(i), DeviceId: fmt.Sprintf("GPU-%03d%s", i, strings.Repeat("x", 200)), Model: strings.Repeat("m", 200),
			DriverVersion: strings.Repeat("d", 200),
		})
	}
	bounds.Facts(facts)
	got := collect.RuntimeOf(facts)
	if len(got.Devices) != len(facts.GetGpus()) || got.Kernel != facts.GetKernel() ||
		got.Container != facts.GetContainerRuntime() || got.Driver != facts.GetGpus()[0].GetDriverVersion() {
		t.Fatalf("of %d GPUs recovery has %d, and %q, %q, %q", len(facts.GetGpus()), len(got.Devices), got.Kernel,
			got.Container, got.Driver)
	}
	for i, d := range got.Devices {
		if d.ID != facts.GetGpus()[i].GetDeviceId() || d.Model != facts.GetGpus()[i].GetModel() {
			t.Errorf("device %d is %+v, want that of %v", i, d, facts.GetGpus()[i])
		}
	}
}
