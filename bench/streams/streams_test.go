package streams_test

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/streams"
	"github.com/gpuaas/mesh/internal/testkit"
)

const childKind = "GPUAAS_TEST_BENCH_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childKind); kind != "" {
		if _, err := streams.Child(context.Background(), kind, os.Stdin, os.Stdout,
			slog.New(slog.DiscardHandler)); err != nil {
			slog.New(slog.NewTextHandler(os.Stderr, nil)).Error("bench child", slog.Any("error", err))
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// TestBenchRuns checks that the bench runs; its figures mean something only with many agents, so they are not judged
// here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	db, err := bench.StartDatabase(t.Context(), testkit.Logger(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	opts := streams.Options{
		Agents: 40, Database: db, Every: 300 * time.Millisecond, Warmup: 2 * time.Second, Logger: testkit.Logger(t),
		Command: func(kind string) *exec.Cmd {
			cmd := exec.Command(os.Args[0]) // this very test
			cmd.Env = append(os.Environ(), childKind+"="+kind)
			return cmd
		},
	}
	if n, err := strconv.Atoi(os.Getenv("GPUAAS_BENCH_AGENTS")); err == nil {
		opts.Agents, opts.Every, opts.Warmup = n, 0, 0
	}
	r, err := streams.Run(testkit.Context(t), opts)
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
