package cancel_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/cancel"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	for _, alone := range []bool{false, true} {
		db := testkit.DB(t)
		opts := cancel.Options{
			LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
			HeartbeatAlone: alone, Lease: 3 * time.Second, Cancels: 12, Logger: testkit.Logger(t),
		}
		if os.Getenv("GPUAAS_BENCH_FULL") != "" {
			opts.Lease, opts.Cancels = 0, 0
		}
		r, err := cancel.Run(testkit.Context(t), opts)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		if err := r.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		t.Log(text.String())
		_, driving := r.Details["at_its_driver_ms"]
		if r.Value <= 0 || r.Baseline <= 0 || r.Details["env_fsync"] != "on" || driving == alone {
			t.Errorf("result = %+v", r)
		}
	}
}
