package procfs_test

import (
	"maps"
	"os/exec"
	"testing"

	"github.com/gpuaas/mesh/agent/runtime/procfs"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestProcessesAreFoundByTheirEnvironment: while a process with the value runs, and not after it.
func TestProcessesAreFoundByTheirEnvironment(t *testing.T) {
	testkit.IO(t)
	cmd := exec.CommandContext(t.Context(), "/bin/cat")
	cmd.Env = []string{"GPUAAS_PROCFS_TEST=one"}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	asked := map[string]bool{"one": true, "two": true}
	if got := procfs.Having("GPUAAS_PROCFS_TEST", asked); !maps.Equal(got, map[string]bool{"one": true}) {
		t.Errorf("found %v", got)
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := procfs.Having("GPUAAS_PROCFS_TEST", asked); len(got) != 0 {
		t.Errorf("found %v after its end", got)
	}
}
