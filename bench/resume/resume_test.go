package resume_test

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/resume"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

const childKind = "GPUAAS_TEST_BENCH_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childKind); kind != "" {
		if _, err := resume.Child(context.Background(), kind, os.Stdin, os.Stdout,
			slog.New(slog.DiscardHandler)); err != nil {
			slog.New(slog.NewTextHandler(os.Stderr, nil)).Error("bench child", slog.Any("error", err))
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// TestBenchRuns checks that the bench runs; its figures mean something only on a quiet machine, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	r, err := resume.Run(testkit.Context(t), resume.Options{
		LifecycleURL: db.URL(pg.RoleLifecycle), SequencerURL: db.URL(pg.RoleSequencer), OwnerURL: db.URL(pg.RoleOwner),
		Lease: 15 * time.Second, Runs: 6, Kills: 2, Logger: testkit.Logger(t),
		Command: func(kind string) *exec.Cmd {
			cmd := exec.Command(os.Args[0]) // this very test
			cmd.Env = append(os.Environ(), childKind+"="+kind)
			return cmd
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := r.WriteText(&text); err != nil {
		t.Fatal(err)
	}
	t.Log(text.String())
	// No replica may take a run over while its lease stands: the driver lived a third of it at most.
	if r.Value < 7500 || r.Baseline <= 0 || r.Details["env_fsync"] != "on" {
		t.Errorf("result = %+v", r)
	}
}
