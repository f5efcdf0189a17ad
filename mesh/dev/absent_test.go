package dev_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAStartGoesOnWithoutMachinesThatCannotConnect has one machine fenced, one retired and the identity of a third lost
// between two starts. The second start neither fails nor waits for them, and names each with what a person does about
// it; what it names brings the third back.
func TestAStartGoesOnWithoutMachinesThatCannotConnect(t *testing.T) {
	testkit.IO(t)
	cfg := config(t)
	cfg.DataDir, cfg.Nodes = migrated(t), 4
	first := start(t, cfg)
	change := func(s started, node string, verb recoveryv1.IdentityVerb) {
		t.Helper()
		if _, err := s.Client().Command.ChangeNodeIdentity(t.Context(), &readmodelv1.ChangeNodeIdentityRequest{
			Node: node, Verb: verb, Reason: "a test",
		}); err != nil {
			t.Fatal(err)
		}
	}
	change(first, "n1", recoveryv1.IdentityVerb_IDENTITY_VERB_FENCE)
	change(first, "n2", recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE)
	lost := first.node(t, "n3").GetNodeId()
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(cfg.DataDir, "agents", "n3")); err != nil {
		t.Fatal(err)
	}
	log := &text{}
	second := startLogging(t, cfg, slog.New(slog.NewTextHandler(log, nil)))
	if strings.Contains(log.String(), "not all agents are connected") {
		t.Error("the start has waited for machines that cannot connect")
	}
	for _, want := range []string{
		"1 of 4 agents connected", "n1 is fenced: `gpuaas nodes get n1`", "n2 is retired: remove " + cfg.DataDir,
		"n3 has lost its identity: `gpuaas nodes retire n3 ",
	} {
		if !strings.Contains(second.out.String(), want) {
			t.Errorf("output lacks %q: %s", want, second.out.String())
		}
	}
	change(second, "n3", recoveryv1.IdentityVerb_IDENTITY_VERB_RETIRE)
	if err := second.stop(); err != nil {
		t.Fatal(err)
	}
	third := start(t, cfg)
	if node := third.node(t, "n3"); !node.GetConnected() || node.GetNodeId() == lost {
		t.Errorf("n3 is %v, want a new node that is connected", node)
	}
}
