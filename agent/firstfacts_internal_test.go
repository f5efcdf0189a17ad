package agent

import (
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/agent/hostfacts"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheFirstFactsStand checks that the facts of the first session are those of a minute later: each machine would
// report a difference to the control plane, which would write it.
func TestTheFirstFactsStand(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	a, err := New(t.Context(), Deps{Logger: testkit.Logger(t)},
		Config{StateDir: filepath.Join(dir, "state"), EtcDir: filepath.Join(dir, "etc"), UIDDir: filepath.Join(dir, "uids")})
	if err != nil {
		t.Fatal(err)
	}
	reported := a.facts.takeAll()
	a.checkRoom(t.Context(), true)
	a.facts.refresh(t.Context())
	if changed := a.facts.changed(); changed != nil {
		t.Errorf("told %v, then found %v: %v", reported, changed, hostfacts.Changed(reported, changed))
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
