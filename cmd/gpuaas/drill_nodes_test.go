package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	drillkit "github.com/gpuaas/mesh/drill/kit"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func TestNodesOfADrillAreKept(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "nodes")
	node := &readmodelv1.Node{NodeId: "n", Name: "node-7", Reason: "agent_down", NextAction: "wait, the agent comes back"}
	result := drillkit.Result{Row: 1, Name: "short-node-outage", Nodes: []*readmodelv1.Node{node}}
	control := result
	control.Row, control.Control = 2, string(drillkit.Withheld)
	for _, r := range []drillkit.Result{result, control, {Row: 3, Name: "without-nodes"}} {
		if err := writeNodes(dir, r); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "01-short-node-outage.txt"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"$ gpuaas nodes get node-7\n", "REASON       agent_down", "wait, the agent comes back"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 1 {
		t.Errorf("kept %v, %v", files, err)
	}
	if err := writeNodes("", result); err != nil {
		t.Error(err)
	}
}
