package hostfacts_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/gpuaas/mesh/agent/hostfacts"
	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

func write(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

func TestThisHost(t *testing.T) {
	testkit.IO(t)
	f := hostfacts.Collect(t.Context(), hostfacts.Config{Paths: []string{t.TempDir(), "/nonexistent"}})
	if f.GetKernel() == "" || f.GetCpus() <= 0 || f.GetMemoryBytes() <= 0 || f.GetArch() == "" || f.GetOs() == "" ||
		f.GetRoot() != (os.Getuid() == 0) {
		t.Errorf("facts %v", f)
	}
	if len(f.GetDisks()) != 1 || f.GetDisks()[0].GetSizeBytes() <= 0 || f.GetDisks()[0].GetFsType() == "" {
		t.Errorf("disks %v", f.GetDisks())
	}
	if hostfacts.BootID(hostfacts.Config{}) == "" {
		t.Error("no boot id")
	}
}

func TestSimulatedGPUs(t *testing.T) {
	testkit.IO(t)
	f := hostfacts.Collect(t.Context(), hostfacts.Config{SimulatedGPUs: 2})
	if len(f.GetGpus()) != 2 || !f.GetGpus()[1].GetSimulated() || f.GetGpus()[1].GetDeviceId() != "gpu-1" ||
		f.GetGpus()[1].GetIndex() != 1 {
		t.Errorf("gpus %v", f.GetGpus())
	}
	if f := hostfacts.Collect(t.Context(), hostfacts.Config{Root: t.TempDir(), SMI: "-"}); len(f.GetGpus()) != 0 {
		t.Errorf("a host without devices has %v", f.GetGpus())
	}
}

func TestDriverFilesAndTool(t *testing.T) {
	testkit.IO(t)
	root := t.TempDir()
	write(t, root, map[string]string{
		"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  " +
			"Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12\n",
		"proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: \t\t NVIDIA A100-PCIE-40GB\nIRQ:   \t\t 119\nGPU " +
			"UUID: \t GPU-1111\nDevice Minor: \t 1\n",
		"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA\x1b[31m A100\nGPU UUID: \t " +
			"GPU-????????\nDevice Minor: \t 0\n",
		"smi": "#!/bin/sh\necho 'GPU-2222, 00000000:01:00.0, 40960, 550.54.15, NVIDIA A100'\necho 'GPU-1111, " +
			"00000000:3B:00.0, 81920, 550.54.15, NVIDIA A100-PCIE-40GB'\n",
	})
	got := hostfacts.Collect(t.Context(), hostfacts.Config{Root: root, SMI: filepath.Join(root, "smi")}).GetGpus()
	want := []*commonv1.Gpu{
		{DeviceId: "GPU-2222", Index: 0, Model: "NVIDIA[31m A100", MemoryBytes: 40960 << 20, DriverVersion: "550.54.15"},
		{
			DeviceId: "GPU-1111", Index: 1, Model: "NVIDIA A100-PCIE-40GB", MemoryBytes: 81920 << 20,
			DriverVersion: "550.54.15",
		},
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Error(diff)
	}
	// If the tool fails or prints nonsense, only the facts that it would have added are missing.
	for _, script := range []string{"#!/bin/sh\nexit 9\n", "#!/bin/sh\necho 'a,\"b'\n", "#!/bin/sh\necho nothing\n"} {
		write(t, root, map[string]string{"smi": script})
		got := hostfacts.Collect(t.Context(), hostfacts.Config{Root: root, SMI: filepath.Join(root, "smi")}).GetGpus()
		if len(got) != 2 || got[0].GetDeviceId() != "gpu-0" || got[1].GetDeviceId() != "GPU-1111" ||
			got[1].GetMemoryBytes() != 0 {
			t.Errorf("gpus %v", got)
		}
	}
}

func TestChanged(t *testing.T) {
	a := &commonv1.HostFacts{Hostname: "h", Disks: []*commonv1.Disk{{Path: "/", SizeBytes: 10, FreeBytes: 5}}}
	b := proto.CloneOf(a)
	b.Disks[0].FreeBytes = 4
	if hostfacts.Changed(a, b) {
		t.Error("free space alone is a change")
	}
	b.Kernel = "new"
	if !hostfacts.Changed(a, b) || !hostfacts.Changed(nil, a) || hostfacts.Changed(nil, nil) {
		t.Error("a change was not seen")
	}
}
