package process_test

import (
	"os"
	"path/filepath"
	"testing"

	nodev1 "github.com/gpuaas/mesh/gen/gpuaas/node/v1"
)

// partial returns the contents that a full disk, a kill or a power cut can leave of a file.
func partial() map[string]string {
	return map[string]string{"empty": "", "cut": `{"pha`, "zeros": "\x00\x00\x00\x00"}
}

// A workload that runs goes on when files of its agent or its shim are lost, and is found again.
func TestARunningWorkloadOutlivesItsFiles(t *testing.T) {
	for _, file := range []string{"state.json", "desired.json"} {
		for name, content := range partial() {
			t.Run(file+"_"+name, func(t *testing.T) {
				dir := host(t)
				g := newRig(t, dir, false)
				g.supervise()
				was := g.deploy(sh("app", "exec sleep 600"))
				path := filepath.Join(dir, "state", workspaceA, "app", file)
				if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
				same := func(st *nodev1.WorkloadStatus) bool {
					return st.GetPhase() == phaseRunning && st.GetPid() == was.GetPid()
				}
				g.until("app", "the same as before", same)
				kill9(t, g.shimOf("app"))
				g.until("app", "adopted by another shim",
					func(st *nodev1.WorkloadStatus) bool { return same(st) && st.GetAdopted() })
				if now := g.file("app", file); now == content {
					t.Errorf("%s is still %q", file, now)
				}
			})
		}
	}
}

// A workload whose spec is lost runs on, and the next deploy replaces it.
func TestALostSpecIsReplacedByTheNextDeploy(t *testing.T) {
	for name, content := range partial() {
		t.Run(name, func(t *testing.T) {
			dir := host(t)
			agent, was := agentProcess(t, dir, sh("app", "exec sleep 600"))
			kill9(t, agent.Process.Pid)
			_ = agent.Wait()
			path := filepath.Join(dir, "state", workspaceA, "app", "spec.json")
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			g := newRig(t, dir, false)
			if problems := g.Problems(); len(problems) != 1 || !running(was) {
				t.Errorf("told is %q; it runs: %t", problems, running(was))
			}
			if st := g.deploy(sh("app", "exec sleep 600")); st.GetPhase() != phaseRunning || int(st.GetPid()) == was {
				t.Errorf("deployed again: %v, was %d", st, was)
			}
			goneSoon(t, was)
		})
	}
}
