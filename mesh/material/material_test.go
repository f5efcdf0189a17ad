package material_test

import (
	"crypto/sha256"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/material"
)

const domain = "mesh.test"

// contents digests every file below dir.
func contents(t *testing.T, dir string) map[string][32]byte {
	t.Helper()
	out := map[string][32]byte{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %04o", path, info.Mode().Perm())
		}
		data, err := os.ReadFile(path)
		out[strings.TrimPrefix(path, dir)] = sha256.Sum256(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestMakingAgainChangesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	make1 := func() map[string][32]byte {
		m, err := material.Make(material.Config{Dir: dir, TrustDomain: domain})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Connect(material.Database{URL: "postgres://127.0.0.1:5432/x"}); err != nil {
			t.Fatal(err)
		}
		return contents(t, dir)
	}
	first := make1()
	if len(first) < 20 {
		t.Errorf("only %d files were made", len(first))
	}
	if diff := cmp.Diff(first, make1()); diff != "" {
		t.Errorf("the second time changed files: %s", diff)
	}
}

func TestEveryServiceIsCertifiedAndTrusted(t *testing.T) {
	t.Parallel()
	m, err := material.Make(material.Config{Dir: t.TempDir(), TrustDomain: domain, Hosts: []string{"mesh.example", "192.0.2.7"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, service := range material.Services() {
		store, err := pki.LoadStore(m.Identity(service), m.Identity(service))
		if err != nil {
			t.Fatal(err)
		}
		trust, err := pki.LoadBundle(m.Trust(service))
		if err != nil {
			t.Fatal(err)
		}
		peer, err := pki.VerifyClientChain(store.Certificate().Certificate, pki.Trust{Kind: pki.KindService, Bundle: trust}, domain, time.Now())
		if err != nil || peer.ID != pki.ServiceID(domain, service) {
			t.Errorf("%s is %v, %v", service, peer.ID, err)
		}
		for _, host := range []string{"localhost", "127.0.0.1", "mesh.example", "192.0.2.7"} {
			if err := peer.Leaf.VerifyHostname(host); err != nil {
				t.Errorf("%s: %v", service, err)
			}
		}
		if _, err := config.SecretFile(m.PasswordFile(service)).Read(); err != nil {
			t.Error(err)
		}
	}
	nodes, err := pki.LoadBundle(m.NodeRoots())
	if err != nil {
		t.Fatal(err)
	}
	services, err := pki.LoadBundle(m.ServiceRoots())
	if err != nil {
		t.Fatal(err)
	}
	if nodes.Fingerprints()[0] == services.Fingerprints()[0] {
		t.Error("nodes and services share an issuer")
	}
}

func TestCertificatesAreReplacedInTime(t *testing.T) {
	t.Parallel()
	cfg := material.Config{Dir: t.TempDir(), TrustDomain: domain, TTL: 9 * time.Hour}
	m, err := material.Make(cfg)
	if err != nil {
		t.Fatal(err)
	}
	serial := func() string {
		store, err := pki.LoadStore(m.Identity(material.NodeAPI), m.Identity(material.NodeAPI))
		if err != nil {
			t.Fatal(err)
		}
		chain, err := pki.ParseChain(store.Certificate().Certificate)
		if err != nil {
			t.Fatal(err)
		}
		return pki.SerialString(chain[0].SerialNumber)
	}
	first := serial()
	cfg.Now = func() time.Time { return time.Now().Add(5 * time.Hour) }
	if m, err = material.Make(cfg); err != nil {
		t.Fatal(err)
	}
	if serial() != first {
		t.Error("a certificate with time left was replaced")
	}
	cfg.Now = func() time.Time { return time.Now().Add(7 * time.Hour) }
	if m, err = material.Make(cfg); err != nil {
		t.Fatal(err)
	}
	second := serial()
	if second == first {
		t.Error("a certificate near its end was kept")
	}
	cfg.Now, cfg.Hosts = nil, []string{"new.example"}
	if m, err = material.Make(cfg); err != nil {
		t.Fatal(err)
	}
	if serial() == second {
		t.Error("a certificate without a new host was kept")
	}
	if renewed, err := m.Renew(); err != nil || renewed {
		t.Errorf("renewed %v, %v right after making", renewed, err)
	}
}

func TestConnectionStrings(t *testing.T) {
	t.Parallel()
	m, err := material.Make(material.Config{Dir: t.TempDir(), TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Connect(material.Database{URL: "postgres:///postgres?host=/tmp/x&port=5", Tenants: "postgres://127.0.0.1:5/postgres"}); err != nil {
		t.Fatal(err)
	}
	for role, want := range map[string]string{pg.RoleNodeAPI: "/tmp/x", pg.RoleWorkloadAdmin: "127.0.0.1"} {
		secret, err := config.SecretFile(m.URLFile(role)).Read()
		if err != nil {
			t.Fatal(err)
		}
		if u := secret.Reveal(); !strings.Contains(u, m.Passwords[role]) || !strings.Contains(u, want) {
			t.Errorf("%s connects by %s", role, u)
		}
	}
}
