package join_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/join"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	for _, without := range []bool{false, true} {
		db := testkit.DB(t)
		opts := join.Options{
			LifecycleURL: db.URL(pg.RoleLifecycle), OwnerURL: db.URL(pg.RoleOwner), WithoutRedis: without,
			Logger: testkit.Logger(t), Length: time.Second, Rounds: 1, Clients: 4, Workspaces: 8,
		}
		if os.Getenv("GPUAAS_BENCH_FULL") != "" {
			opts.Length, opts.Rounds, opts.Clients, opts.Workspaces = 0, 0, 0, 0
		}
		r, err := join.Run(testkit.Context(t), opts)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		if err := r.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		t.Log(text.String())
		if r.Value <= 0 || r.Baseline <= 0 || r.Details["env_fsync"] != "on" ||
			(r.Details["env_redis"] == "none") != without {
			t.Errorf("result = %+v", r)
		}
	}
}
