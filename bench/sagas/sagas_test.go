package sagas_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/sagas"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	opts := sagas.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Length: 2 * time.Second, Rounds: 1, Clients: 8, Workers: 8, Logger: testkit.Logger(t),
	}
	if os.Getenv("GPUAAS_BENCH_FULL") != "" {
		opts.Length, opts.Rounds, opts.Clients, opts.Workers = 0, 0, 0, 0
	}
	r, err := sagas.Run(testkit.Context(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Log(text.String())
	if r.Value <= 0 || r.Baseline <= 0 || r.Details["env_fsync"] != "on" {
		t.Errorf("result = %+v", r)
	}
}
