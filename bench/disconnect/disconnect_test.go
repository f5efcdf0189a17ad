package disconnect_test

import (
	"strings"
	"testing"

	"github.com/gpuaas/mesh/bench/disconnect"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	r, err := disconnect.Run(testkit.Context(t), disconnect.Options{
		Nodes: 2, Rounds: 2, Replicas: 1, Programs: meshtest.Programs(t), Logger: testkit.Logger(t),
	})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Log(text.String())
	broken, _ := r.Details["disconnected_ms"].(string)
	back, _ := r.Details["connected_again_ms"].(string)
	if r.Value <= 0 || !strings.HasSuffix(broken, " of 4") || !strings.HasSuffix(back, " of 4") {
		t.Errorf("result = %+v", r)
	}
}
