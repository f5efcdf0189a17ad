package recovery

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestAnUnreadableFileOfAuthoritiesKeepsTheFormer holds for a file that is broken, and one that is gone.
func TestAnUnreadableFileOfAuthoritiesKeepsTheFormer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "roots.pem")
	put := func(text []byte) {
		t.Helper()
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	bundle := func() []byte {
		t.Helper()
		services, err := ca.OpenServiceCA(t.TempDir(), "mesh.test")
		if err != nil {
			t.Fatal(err)
		}
		b, err := services.Bundle()
		if err != nil {
			t.Fatal(err)
		}
		return b.PEM()
	}
	one := bundle()
	put(one)
	p, err := readProfile(testkit.Logger(t), Profile{Name: "test", CAFile: path})
	if err != nil {
		t.Fatal(err)
	}
	p.every = 0
	first := p.current().GetFingerprint()
	put([]byte("no certificate"))
	if now := p.current(); now.GetFingerprint() != first || string(now.GetCaBundlePem()) != string(one) {
		t.Error("a broken file has changed the profile")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if p.current().GetFingerprint() != first {
		t.Error("a file that is gone has changed the profile")
	}
	put(append(bundle(), one...))
	if p.current().GetFingerprint() == first {
		t.Error("the profile is as it was after its file has changed")
	}
}
