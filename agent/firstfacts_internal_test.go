package agent

import (
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/agent/hostfacts"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheFirstFactsStand holds that what an agent tells of its host at its first session is what it finds a minute later: a difference would be told to the
// control plane and written there, by each machine.
func TestTheFirstFactsStand(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	a, err := New(t.Context(), Deps{Logger: testkit.Logger(t)}, Config{StateDir: filepath.Join(dir, "state"), EtcDir: filepath.Join(dir, "etc"), UIDDir: filepath.Join(dir, "uids")})
	if err != nil {
		t.Fatal(err)
	}
	told := a.facts.tell()
	a.checkRoom(t.Context(), true)
	a.facts.refresh(t.Context())
	if changed := a.facts.changed(); changed != nil {
		t.Errorf("told %v, then found %v: %v", told, changed, hostfacts.Changed(told, changed))
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
