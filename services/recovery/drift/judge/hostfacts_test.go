package judge_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

// facts returns the facts of a host with two named devices.
func facts(change ...func(*commonv1.HostFacts)) *commonv1.HostFacts {
	f := &commonv1.HostFacts{
		Hostname: "h", Kernel: "6.1.0", ContainerRuntime: "containerd 1.7.22", Addresses: []string{"10.0.0.4", "fd00::4"},
		Gpus: []*commonv1.Gpu{
			{DeviceId: "GPU-a", Index: 0, Model: "A100", DriverVersion: "550.54"},
			{DeviceId: "GPU-b", Index: 1, Model: "A100", DriverVersion: "550.54"},
		},
	}
	for _, c := range change {
		c(f)
	}
	return f
}

func TestDifferencesOfTheRuntime(t *testing.T) {
	driver := func(v string) func(*commonv1.HostFacts) {
		return func(f *commonv1.HostFacts) {
			for _, g := range f.GetGpus() {
				g.DriverVersion = v
			}
		}
	}
	nameless := func(f *commonv1.HostFacts) {
		for i, g := range f.GetGpus() {
			g.DeviceId = fmt.Sprintf("gpu-%d", i)
		}
	}
	for name, c := range map[string]struct {
		is   *commonv1.HostFacts
		want string // part of it; empty: nothing differs
	}{
		"the same": {facts(), ""},
		"another kernel": {
			facts(func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" }), "kernel is 6.9.0, accepted is 6.1.0",
		},
		"no kernel known":     {facts(func(f *commonv1.HostFacts) { f.Kernel = "" }), ""},
		"another driver":      {facts(driver("570.1")), "GPU driver is 570.1, accepted is 550.54"},
		"no runtime reported": {facts(func(f *commonv1.HostFacts) { f.ContainerRuntime = "" }), ""},
		"another runtime": {
			facts(func(f *commonv1.HostFacts) { f.ContainerRuntime = "containerd 2.0.0" }),
			"container runtime is containerd 2.0.0, accepted is containerd 1.7.22",
		},
		"a device less": {
			facts(func(f *commonv1.HostFacts) { f.Gpus = f.GetGpus()[:1] }),
			"GPUs are 1 (A100 GPU-a), accepted are 2 (A100 GPU-a, A100 GPU-b)",
		},
		"no devices": {facts(func(f *commonv1.HostFacts) { f.Gpus = nil }), "GPUs are none"},
		"another device": {
			facts(func(f *commonv1.HostFacts) { f.GetGpus()[1].DeviceId = "GPU-c" }), "A100 GPU-c",
		},
		"another model": {facts(func(f *commonv1.HostFacts) { f.GetGpus()[1].Model = "H100" }), "H100 GPU-b"},
		"devices in another order": {facts(func(f *commonv1.HostFacts) {
			f.GetGpus()[0].Index, f.GetGpus()[1].Index = 1, 0
		}), ""},
		"devices that the driver has not named": {facts(nameless), ""},
		"unnamed devices of another model": {
			facts(nameless, func(f *commonv1.HostFacts) { f.GetGpus()[0].Model = "H100" }), "H100 gpu-0",
		},
		"addresses, disks and memory": {facts(func(f *commonv1.HostFacts) {
			f.Addresses, f.MemoryBytes, f.Disks = nil, 1, []*commonv1.Disk{{Path: "/x"}}
		}), ""},
		"two at once": {
			facts(driver("570.1"), func(f *commonv1.HostFacts) { f.Kernel = "6.9.0" }),
			"GPU driver is 570.1, accepted is 550.54; kernel is 6.9.0",
		},
	} {
		got := collect.RuntimeOf(c.is).Differences(collect.RuntimeOf(facts()))
		if (c.want == "") != (got == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// TestHostileFactsAreCleanedAndBounded checks that facts of a hostile agent are cleaned and bounded, since they are
// shown to people and stored.
func TestHostileFactsAreCleanedAndBounded(t *testing.T) {
	const evil = "\x1b[31mred\x00\u202e\nnext\xff"
	f := &commonv1.HostFacts{Kernel: strings.Repeat(evil, 1<<14), ContainerRuntime: evil}
	for i := range 10_000 {
		f.Gpus = append(f.Gpus, &commonv1.Gpu{
			DeviceId: evil + fmt.Sprint(i), Index: int32(-i), Model: strings.Repeat("m", 1<<12), DriverVersion: fmt.Sprint(i),
		})
	}
	is := collect.RuntimeOf(f)
	if len(is.Devices) > 64 || len(is.Kernel) > 128 || len(is.Driver) > 128 {
		t.Errorf("%d devices, a kernel of %d bytes, a driver of %d", len(is.Devices), len(is.Kernel), len(is.Driver))
	}
	detail := is.Differences(collect.RuntimeOf(facts()))
	if detail == "" || len(detail) > 512 || !utf8.ValidString(detail) {
		t.Errorf("the detail has %d bytes: %q", len(detail), detail)
	}
	for _, text := range []string{detail, is.Kernel, is.Container, is.Devices[0].ID} {
		if i := strings.IndexFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }); i >= 0 {
			t.Errorf("%q does not print at %d", text, i)
		}
	}
}
