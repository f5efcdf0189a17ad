//go:build !release

package hostfacts_test

import (
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/agent/hostfacts"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestRootFromEnvironment(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	write(t, dir, map[string]string{"file": ""})
	for value, ok := range map[string]bool{
		"": true, dir: true, "relative": false, filepath.Join(dir, "none"): false, filepath.Join(dir, "file"): false,
	} {
		t.Setenv("GPUAAS_FACTS_ROOT", value)
		got, err := hostfacts.RootFromEnvironment()
		if (err == nil) != ok || (ok && got != value) {
			t.Errorf("GPUAAS_FACTS_ROOT=%q: root %q, %v", value, got, err)
		}
	}
}

func TestFactsOfARoot(t *testing.T) {
	testkit.IO(t)
	root := t.TempDir()
	cfg := hostfacts.Config{Root: root, SimulatedGPUs: 1}
	write(t, root, map[string]string{
		"proc/sys/kernel/osrelease": "6.1.0-drill\n", "proc/sys/kernel/hostname": "other\n",
		"proc/sys/kernel/random/boot_id": "b-1\n", "etc/machine-id": "m-1\n",
	})
	first := hostfacts.Collect(t.Context(), cfg)
	if first.GetKernel() != "6.1.0-drill" || first.GetHostname() != "other" || first.GetMachineId() != "m-1" ||
		first.GetGpus()[0].GetDriverVersion() != "simulated" || hostfacts.BootID(cfg) != "b-1" {
		t.Errorf("facts %v", first)
	}
	write(t, root, map[string]string{"proc/driver/nvidia/version": "NVRM version: Kernel Module  570.1  Tue\n"})
	second := hostfacts.Collect(t.Context(), cfg)
	if got := second.GetGpus()[0].GetDriverVersion(); got != "570.1" || !hostfacts.Changed(first, second) {
		t.Errorf("driver %q, changed %t", got, hostfacts.Changed(first, second))
	}
}
