package dev_test

import (
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
	"github.com/gpuaas/mesh/mesh/reap"
)

func TestSuddenDeathLosesNothing(t *testing.T) {
	testkit.IO(t)
	ctx := testkit.Context(t)
	cfg := config(t)
	cfg.DataDir, cfg.NoDemo = filepath.Join(meshtest.Dir(t), "data"), false
	out, errs := &text{}, &text{}
	const anyPort = "127.0.0.1:0"
	cmd := exec.CommandContext(ctx, filepath.Join(meshtest.Programs(t), "gpuaas"), "dev", "--data-dir", cfg.DataDir,
		"--nodes", "1", "--context-name", "", "--console-addr", anyPort, "--node-addr", anyPort, "--enroll-addr", anyPort,
		"--metrics-addr", anyPort)
	cmd.Stdout, cmd.Stderr = out, errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 2*time.Minute, func() error {
		if !strings.Contains(out.String(), "acme/demo → active") {
			return errors.New("the demo is not active yet: " + out.String() + errs.String())
		}
		return nil
	})
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	// The instance is no child of the mesh and works on; its workload answers although no control plane runs.
	procs, err := reap.Under(filepath.Join(cfg.DataDir, "placement"), agents.Program)
	if err != nil || len(procs) == 0 {
		t.Errorf("no box lives on: %v", err)
	}

	next := start(t, cfg)
	if node := next.node(t, "n1"); !node.GetConnected() ||
		node.GetIdentity().GetState() != commonv1.NodeIdentityState_NODE_IDENTITY_STATE_ACTIVE {
		t.Errorf("node %v", node)
	}
	ws := next.await(t, "acme/demo", commonv1.WorkspaceState_WORKSPACE_STATE_ACTIVE)
	if ws.GetEpoch() != 1 {
		t.Errorf("the workspace was launched again: epoch %d", ws.GetEpoch())
	}
	testkit.Eventually(t, testkit.Patience, func() error {
		if !next.node(t, ws.GetNodeName()).GetConnected() {
			return errors.New("the box is not connected")
		}
		return nil
	})
}
