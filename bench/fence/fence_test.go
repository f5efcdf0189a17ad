package fence_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/bench/fence"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/agents"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	r, err := fence.Run(testkit.Context(t), fence.Options{
		Nodes: 3, Rounds: 1, Agent: filepath.Join(meshtest.Programs(t), agents.Program), Logger: testkit.Logger(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Log(text.String())
	returned, _ := r.Details["returned_ms"].(string)
	served, _ := r.Details["served_ms"].(string)
	if r.Value <= 0 || !strings.HasSuffix(returned, " of 9") || !strings.HasSuffix(served, " of 9") {
		t.Errorf("result = %+v", r)
	}
}
