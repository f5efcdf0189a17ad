package bounds

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// claiming returns the facts of a host that claims so many GPUs, in the reverse of their order, and addresses.
func claiming(gpus, addresses int) *commonv1.HostFacts {
	out := &commonv1.HostFacts{Kernel: "6.1.0", ContainerRuntime: "containerd 1.7.22"}
	for i := range gpus {
		out.Gpus = append(out.Gpus, &commonv1.Gpu{
			Index: int32(gpus - 1 - i), DeviceId: fmt.Sprintf("GPU-%03d", gpus-1-i), Model: "H100", DriverVersion: "550.54",
		})
	}
	for i := range addresses {
		out.Addresses = append(out.Addresses, fmt.Sprintf("192.0.2.%03d", addresses-1-i), fmt.Sprintf("10.0.0.%d", i%200))
	}
	return out
}

// The facts of a host that claims more than a host can have are cut to the bounds, in whichever order it names them;
// the facts of a sound host stay as they are.
func TestFactsAreBounded(t *testing.T) {
	sound := claiming(MostGPUs, MostAddresses/2)
	was := proto.CloneOf(sound)
	if got := Facts(sound); got != (FactsCut{}) || !proto.Equal(sound, was) {
		t.Errorf("sound facts: cut %+v, they became %v", got, sound)
	}
	if got := Facts(nil); got != (FactsCut{}) {
		t.Errorf("no facts: cut %+v", got)
	}
	hostile := claiming(500, 0)
	hostile.Kernel = strings.Repeat("é", 100)
	hostile.Gpus[499].Model = strings.Repeat("x", 1000)
	hostile.Gpus[0].Model = strings.Repeat("x", 1000) // of the last index: it is cut with its GPU
	for i := range 200 {
		hostile.Addresses = append(hostile.Addresses, fmt.Sprintf("10.0.1.%d", i), "10.0.1.0", "none")
	}
	if got := Facts(hostile); got != (FactsCut{GPUs: 436, Addresses: 136, Texts: 2}) {
		t.Errorf("hostile facts: cut %+v", got)
	}
	if len(hostile.GetGpus()) != MostGPUs || hostile.GetGpus()[0].GetIndex() != 0 ||
		hostile.GetGpus()[63].GetIndex() != 63 || len(hostile.GetAddresses()) != MostAddresses ||
		len(hostile.GetGpus()[0].GetModel()) != MostFact ||
		len(hostile.GetKernel()) > MostFact || !utf8.ValidString(hostile.GetKernel()) {
		t.Errorf("hostile facts became %v", hostile)
	}
}

// The facts of a frame are bounded wherever they stand in it.
func TestFactsOfFramesAreBounded(t *testing.T) {
	for name, frame := range map[string]*nodev1.ConnectRequest{
		"Hello": {Frame: &nodev1.ConnectRequest_Hello{Hello: &nodev1.Hello{Host: claiming(65, 0)}}},
		"Heartbeat": {Frame: &nodev1.ConnectRequest_Heartbeat{
			Heartbeat: &nodev1.Heartbeat{ChangedFacts: claiming(65, 0)},
		}},
	} {
		if got := Reported(frame, time.Now()); got != (Cut{Facts: FactsCut{GPUs: 1}}) {
			t.Errorf("%s: cut %+v", name, got)
		}
	}
}
