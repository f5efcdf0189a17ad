package recovery_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/recovery"
)

// second builds another replica on the mesh's database with another directory of join state keys.
func (m *mesh) second(keys string) error {
	m.t.Helper()
	registry, err := obs.NewRegistry()
	if err != nil {
		m.t.Fatal(err)
	}
	cfg := m.cfg
	cfg.JoinStateKeys = keys
	service, err := recovery.New(m.ctx, recovery.Deps{Logger: testkit.Logger(m.t), Registry: registry}, cfg)
	if err == nil {
		service.Close()
	}
	return err
}

// Scenario: a second replica of recovery comes up on another machine, whose directory of keys was not copied. With a key of its own each of the two
// would take what the other signed for unknown.
func TestAReplicaWithADirectoryOfItsOwnDoesNotStart(t *testing.T) {
	m := start(t)
	other := t.TempDir()
	err := m.second(other)
	if err == nil {
		t.Fatal("a replica with an empty directory of its own started beside the first")
	}
	if !strings.Contains(err.Error(), "signing_keys_differ") || !strings.Contains(err.Error(), "join-000001.pem") {
		t.Fatalf("the refusal names no file: %v", err)
	}
	data, err := os.ReadFile(filepath.Join(m.cfg.JoinStateKeys, "join-000001.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(other, "join-000001.pem"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.second(other); err != nil {
		t.Fatalf("with the file it was told to copy: %v", err)
	}
}
