package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/mesh/cluster"
)

// TestACopyIsFoundAcrossAKill starts a copy of a machine's identity beside the original. Both must be held, even if
// recovery dies while it handles the report.
func TestACopyIsFoundAcrossAKill(tt *testing.T) {
	t := beside(tt, 8*time.Minute)
	ctx := t.ctx
	c := start(t, cluster.Config{
		Nodes: 1,
		Env:   []string{"GPUAAS_FAILPOINTS=recovery.report_challenge.*=kill", "GPUAAS_NODEAPI_OPEN_EVERY=200ms"},
	})
	before := machines(t, c)
	root := filepath.Dir(c.Plan.InstanceDir)
	copied := filepath.Join(root, "agents", "copy")
	if err := os.CopyFS(copied, os.DirFS(filepath.Join(root, "agents", "n1"))); err != nil {
		t.Fatal(err)
	}
	// our own directory
	if err := exec.CommandContext(ctx, "chmod", "-R", "go-rwx", copied).Run(); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(root, "log", "copy.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	clone := exec.CommandContext(ctx, c.Plan.AgentBinary, "run", "--etc-dir", filepath.Join(copied, "etc"), "--state-dir",
		filepath.Join(copied, "state"))
	clone.Stdout, clone.Stderr = log, log
	began := time.Now()
	if err := clone.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = clone.Process.Kill()
		_ = clone.Wait()
	})
	mesh := database(t, c, pg.DatabaseMesh)
	t.want("both holders to be held", time.Minute, func(context.Context) error {
		got := column(t, mesh, `SELECT state || ' ' || alarm FROM recovery.identity WHERE node_id = $1::uuid`, before["n1"])
		if len(got) != 1 || got[0] != "held cloned_identity_detected" {
			return fmt.Errorf("the node is %v", got)
		}
		return nil
	})
	t.Logf("the copy is found after %.1f s", time.Since(began).Seconds())
	if points, _ := hits(t, c); points["recovery.report_challenge.before_commit"] == 0 {
		t.Error("recovery was not killed as it was told of the answer")
	}
	checkLogs(t, c, nil)
}
