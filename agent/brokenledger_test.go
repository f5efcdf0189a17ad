package agent_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuaas/mesh/agent"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A task ledger that cannot be made the new node's is a fault of the state directory, which no operator's bundle
// repairs.
func TestABrokenLedgerIsNoProfileDrift(t *testing.T) {
	m := newMesh(t)
	cfg := config(t.TempDir())
	a := open(t, cfg)
	if err := a.Enrol(t.Context(), agent.Bundle{Path: m.bundle(firstToken)}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cfg.StateDir, agent.LedgerFile)
	if err := errors.Join(os.Remove(path), os.Mkdir(path, 0o700)); err != nil {
		t.Fatal(err)
	}
	end, _ := run(t, a)
	testkit.Eventually(t, testkit.Patience, func() error {
		entries, err := agent.Diagnostics(cfg.StateDir, time.Now())
		if err != nil {
			return err
		}
		for _, e := range entries {
			switch e.Code {
			case "endpoint_profile_drift":
				t.Fatalf("it is recorded as %v", e)
			case "state_directory_failed":
				return nil
			}
		}
		return errors.New("it is not recorded")
	})
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	m.wait("admitted")
	if err := end(); err != nil {
		t.Fatal(err)
	}
}
