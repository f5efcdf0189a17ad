package beside_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/bench"
	"github.com/gpuaas/mesh/bench/beside"
	"github.com/gpuaas/mesh/bench/beside/peer"
	"github.com/gpuaas/mesh/bench/process"
	"github.com/gpuaas/mesh/bench/tasks"
	"github.com/gpuaas/mesh/internal/testkit"
)

const childKind = "GPUAAS_TEST_BENCH_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(childKind); kind != "" {
		if err := child(context.Background(), kind); err != nil {
			slog.New(slog.NewTextHandler(os.Stderr, nil)).Error("bench child", slog.Any("error", err))
			os.Exit(1)
		}
		os.Exit(0)
	}
	testkit.Main(m)
}

// imitated is how many units an engine of the test does in a hundred seconds: one that any machine outdoes, however
// busy it is, and one that none does.
var imitated = map[string]int{"dbos": 10, "river": 100_000_000}

// child serves the agents of our tasks, or imitates another engine: the real ones are of another module.
func child(ctx context.Context, kind string) error {
	if imitated[kind] == 0 {
		_, err := tasks.Child(ctx, kind, os.Stdin, os.Stdout, slog.New(slog.DiscardHandler))
		return err
	}
	return process.Serve(ctx, os.Stdin, os.Stdout, process.Verbs{
		"start": process.With(func(_ context.Context, setup peer.Setup) (any, error) {
			if setup.AdminURL == "" || setup.Database == "" {
				return nil, fmt.Errorf("an incomplete setup: %+v", setup)
			}
			return peer.Described{Version: "v0", Settings: map[string]any{"workers": setup.Workers}}, nil
		}),
		"stretch": process.With(func(context.Context, peer.Load) (any, error) {
			return peer.Stretch{Units: imitated[kind], Took: 100 * time.Second, P50: 1, P99: 2}, nil
		}),
	})
}

func command(kind string) *exec.Cmd {
	cmd := exec.Command(os.Args[0]) // this very test
	cmd.Env = append(os.Environ(), childKind+"="+kind)
	return cmd
}

// TestBesideOthers checks that both comparisons are measured and judged by the medians: ours is faster than an engine
// that does one in ten seconds, and slower than one that does a million. The figures of ours mean something only on a
// quiet machine.
func TestBesideOthers(t *testing.T) {
	testkit.IO(t)
	db, err := bench.StartDatabase(t.Context(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	opts := beside.Options{
		Database: db, Command: command, Peers: command, Length: 500 * time.Millisecond, Rounds: 1, Agents: 4,
		Clients: []int{2, 4},
		Logger:  slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	for _, c := range []struct {
		what     func(context.Context, beside.Options) (bench.Result, error)
		ours     string
		baseline float64
		passed   bool
	}{
		{beside.Sagas, "ours, 4 at once", 0.1, true},
		{beside.Tasks, "ours", 1_000_000, false},
	} {
		r, err := c.what(testkit.Context(t), opts)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		if err := r.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		t.Log(text.String())
		if r.Baseline != c.baseline || r.Passed != c.passed || r.Value <= 0 {
			t.Errorf("result = %+v", r)
		}
		for _, figure := range []string{": cpu ms a unit", ": WAL bytes a unit", ": of it projection, WAL bytes a unit"} {
			if v, ok := r.Details[c.ours+figure].(float64); !ok || v <= 0 {
				t.Errorf("%s%s = %v", c.ours, figure, r.Details[c.ours+figure])
			}
		}
	}
}

// TestNoClientsAreRefused checks that a comparison for no clients at once is refused before anything is started.
func TestNoClientsAreRefused(t *testing.T) {
	opts := beside.Options{Database: &bench.Database{}, Command: command, Peers: command, Clients: []int{}}
	if _, err := beside.Sagas(t.Context(), opts); err == nil {
		t.Error("sagas of no clients were measured")
	}
}
