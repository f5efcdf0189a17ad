package reconnect_test

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench/reconnect"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

const childKind = "GPUAAS_TEST_BENCH_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childKind); kind != "" {
		logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
		if _, err := reconnect.Child(context.Background(), kind, os.Stdin, os.Stdout, logger); err != nil {
			logger.Error("bench child", slog.Any("error", err))
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// TestBenchRuns checks that the bench runs, and that every agent of a killed replica comes back; its figures mean
// something only with many agents, so they are not judged here.
func TestBenchRuns(t *testing.T) {
	testkit.IO(t)
	r, err := reconnect.Run(testkit.Context(t), reconnect.Options{
		Agents: 50, Replicas: 1, Rounds: 1, Stable: time.Millisecond, VerdictsAfter: time.Millisecond,
		Programs: meshtest.Programs(t), Logger: testkit.Logger(t),
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
	if r.Value <= 0 || r.Baseline <= 0 || r.Details["env_fsync"] != "on" || r.Details["identities_not_active"] != "none" {
		t.Errorf("result = %+v", r)
	}
}
