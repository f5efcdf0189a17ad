package process

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/testkit"
)

// visited returns how many instances of the launch log were visited so far.
func visited(t *testing.T, d *Driver) int {
	t.Helper()
	n := 0
	if err := d.launchLog.with(testkit.Context(t), func(l *content, _ func(entry) error) error {
		n = l.visited
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestWhatRunsOftenVisitsWhatStands checks that of a log of 1,000 instances that have ended, each round of Keep, a
// launch and a scan for strays visit only the few that have not ended.
func TestWhatRunsOftenVisitsWhatStands(t *testing.T) {
	ctx, d := testkit.Context(t), newDriver(t, 4, 4)
	log, err := os.ReadFile(logOf(t, 1000).path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.cfg.Dir, "launches.jsonl"), log, 0o600); err != nil {
		t.Fatal(err)
	}
	ws := ids.New()
	mustLaunch(t, d, newInstance(ws, 1))
	for _, tt := range []struct {
		name string
		run  func() error
		most int
	}{
		{name: "a round of Keep", run: func() error { return d.keepOnce(ctx) }, most: 1},
		{name: "a scan for strays", run: func() error { return d.endStrays(ctx) }, most: 1},
		{name: "a launch", run: func() error { _, err := d.Launch(ctx, newInstance(ids.New(), 1)); return err }, most: 2},
	} {
		before := visited(t, d)
		if err := tt.run(); err != nil {
			t.Fatal(err)
		}
		if n := visited(t, d) - before; n > tt.most {
			t.Errorf("%s visits %d instances, more than %d", tt.name, n, tt.most)
		}
	}
	if before := visited(t, d); before > 4 {
		t.Errorf("%d instances were visited in all", before)
	}
	mustEnd(t, d, ws, 1)
	if list, err := d.List(ctx); err != nil || len(list) != 1002 {
		t.Errorf("%d instances are listed, want 1002: %v", len(list), err)
	}
}

// TestAnIDOfAnInstanceIsItsKey: keyOf parses the ids by which directories and processes are named, and nothing else.
func TestAnIDOfAnInstanceIsItsKey(t *testing.T) {
	ws := ids.New()
	if k, ok := keyOf(instanceID(ws, 12)); !ok || k != (instanceKey{ws, 12}) {
		t.Errorf("the id of epoch 12 is of %+v, %v", k, ok)
	}
	for _, id := range []string{"", "-", ws, ws + "-", ws + "-01", ws + "-x"} {
		if k, ok := keyOf(id); ok && k.workspaceID == ws {
			t.Errorf("%q is of %+v", id, k)
		}
	}
}
