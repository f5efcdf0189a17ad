package drill_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/mesh/drill"
	"github.com/gpuaas/mesh/drill/kit"
	"github.com/gpuaas/mesh/drill/kit/mesh"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/mesh/meshtest"
)

// envReap makes this test binary the reaper of the named directory.
const envReap = "GPUAAS_DRILL_REAP"

// TestMain doubles as the process that ends everything that a mesh has launched, however suddenly the tests end.
func TestMain(m *testing.M) {
	if dir := os.Getenv(envReap); dir != "" {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		if err := mesh.Reap(ctx, os.Stdin, dir); err != nil {
			os.Exit(1)
		}
		return
	}
	testkit.Main(m)
}

// TestEveryDrillIsWhole checks that no drill lacks a text, a budget or a control.
func TestEveryDrillIsWhole(t *testing.T) {
	rows := []int{}
	for _, d := range drill.Drills() {
		t.Run(d.Name, func(t *testing.T) {
			b, ok := policy.BudgetOf(d.Name)
			if !ok {
				t.Fatal("the matrix has no row of this name")
			}
			rows = append(rows, b.Row)
			if b.Detect+time.Duration(len(b.DetectKey)) == 0 || b.RecoverWithin() == 0 {
				t.Errorf("budgets are missing: %+v", b)
			}
			for what, text := range map[string]string{
				"what is injected": d.Injects, "what is seen": d.Sees, "how it is over": d.Recovers, "what it needs": d.Needs,
				"why the mutation is one": d.Mutation, "reason": d.Expect.Reason, "user state": d.Expect.UserState,
				"owner": d.Expect.Owner, "next action": d.Expect.Next,
			} {
				if text == "" {
					t.Errorf("%s is not said", what)
				}
			}
			if strings.Contains(d.Mutation, "verdict is read") {
				t.Error("the mutation changes what the drill reads, and not the detector")
			}
			if d.Run == nil || d.FailsAt == "" {
				t.Error("the drill has no way to be run, or no stage at which its mutated detector must fail")
			}
		})
	}
	if !slices.IsSorted(rows) {
		t.Errorf("the rows come as %v", rows)
	}
}

// TestResultsCarryTheContract checks the names that scripts read.
func TestResultsCarryTheContract(t *testing.T) {
	raw, err := json.Marshal(kit.Result{})
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]any{}
	if err := json.Unmarshal(raw, &fields); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{
		"name", "severity", "injected", "reason", "user_state", "detected_seconds", "detection_budget_seconds",
		"recovered_seconds", "recovery_budget_seconds", "passed", "evidence_ids", "why",
	} {
		if _, ok := fields[name]; !ok {
			t.Errorf("a result has no field %s", name)
		}
	}
}

func TestUnknownDrillsAreNamed(t *testing.T) {
	if _, err := drill.Find("saga-step-wedged", "no-such-drill"); err == nil {
		t.Error("an unknown drill is taken")
	}
	got, err := drill.Find("saga-step-wedged", "double-provision-race")
	if err != nil || len(got) != 2 || got[0].Name != "double-provision-race" {
		t.Errorf("found %v, %v", got, err)
	}
}

// up starts a mesh of the drills' own, which ends with the test.
func up(ctx context.Context, t *testing.T) *mesh.Mesh {
	t.Helper()
	began := time.Now()
	dir := meshtest.Dir(t)
	meshtest.Postgres(t, filepath.Join(dir, "mesh", "postgres"))
	m, err := mesh.Start(ctx, testkit.Logger(t), mesh.Config{
		Dir: dir, Programs: meshtest.Programs(t), LogLevel: "info",
		Reaper: func(dir string) *exec.Cmd {
			cmd := exec.Command(os.Args[0]) // this binary, which outlives us on purpose
			cmd.Env = append(os.Environ(), envReap+"="+dir)
			return cmd
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the logs end with:\n%s", m.Tails(10))
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Minute)
		defer cancel()
		if err := m.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	t.Logf("the mesh stands after %.1f s", time.Since(began).Seconds())
	return m
}

// meshes is how many meshes run drills at a time: most of what a drill does is wait.
const meshes = 3

// TestDrillsAndTheirControls runs every drill in its scaled form, as `gpuaas drill run --all --controls` does, on some
// meshes beside each other: each takes the next drill when it has ended one. The first begins when the faults have run
// that drills are made of. The control without a fault, and both of slow drills, run with GPUAAS_TEST_LONG.
func TestDrillsAndTheirControls(t *testing.T) {
	drills := make(chan kit.Drill, len(drill.Drills()))
	for _, d := range drill.Drills() {
		drills <- d
	}
	close(drills)
	var running sync.WaitGroup
	for i := range meshes {
		running.Go(func() {
			if i == 0 {
				t.Run("faults", runFaults)
			}
			t.Run(fmt.Sprintf("mesh %d", i+1), func(t *testing.T) { runAll(t, drills) })
		})
	}
	running.Wait()
}

// runAll runs drills with their controls on a mesh of their own.
func runAll(t *testing.T, drills <-chan kit.Drill) {
	t.Helper()
	testkit.IO(t)
	ctx, cancel := context.WithTimeout(t.Context(), 35*time.Minute)
	defer cancel()
	m := up(ctx, t)
	for d := range drills {
		controls := testkit.Repeat([]kit.Control{kit.Mutated}, kit.Controls())
		if d.Slow {
			controls = testkit.Repeat(nil, controls)
		}
		results, err := kit.All(ctx, m, []kit.Drill{d}, kit.Options{
			Logger: testkit.Logger(t), Controls: controls, Each: func(r kit.Result) { show(t, r) },
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if !r.Passed {
				t.Errorf("%s failed at %q: %s; %q", r.Name, r.Stage, r.Why, r.Notes)
			}
			if r.Control == "" && (len(r.EvidenceIDs) < 2 || !r.Injected || r.DetectedSeconds == 0 ||
				r.RecoveredSeconds == 0) {
				t.Errorf("%s passed and says too little: %+v", r.Name, r)
			}
		}
		if want := 1 + len(controls); len(results) != want {
			t.Errorf("%s has %d results, not %d", d.Name, len(results), want)
		}
	}
}

// show logs a result as it comes.
func show(t *testing.T, r kit.Result) {
	t.Helper()
	t.Logf("%-45s passed %t, detected %.2f s of %.0f, recovered %.2f s of %.0f, took %.1f s: %s", r.Name, r.Passed,
		r.DetectedSeconds, r.DetectionBudgetSeconds, r.RecoveredSeconds, r.RecoveryBudgetSeconds, r.ElapsedSeconds, r.Why)
}
