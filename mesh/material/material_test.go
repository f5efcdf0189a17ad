package material_test

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
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
	m, err := material.Make(material.Config{
		Dir: t.TempDir(), TrustDomain: domain,
		Hosts: []string{"mesh.example", "192.0.2.7"},
	})
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
		peer, err := pki.VerifyClientChain(store.Certificate().Certificate, pki.Trust{Kind: pki.KindService, Bundle: trust},
			domain, time.Now())
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

// TestIssuersRollBesideARunningMesh: a mesh that runs renews certificates each hour with the material that it opened at
// its start, while another process changes the issuer in the same directory.
func TestIssuersRollBesideARunningMesh(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := material.Open(dir); !errors.Is(err, material.ErrNone) {
		t.Fatalf("open of an empty directory: %v", err)
	}
	running, err := material.Make(material.Config{
		Dir: dir, TrustDomain: domain,
		Hosts: []string{"mesh.example", "192.0.2.7", "2001:db8::7"},
	})
	if err != nil {
		t.Fatal(err)
	}
	beside, err := material.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if renewed, err := beside.Renew(); err != nil || renewed {
		t.Fatalf("renewed %v, %v: the certificates are good", renewed, err)
	}
	// issuers returns for each issuer of how many services it has issued the certificate, with a mark at the newest.
	issuers := func(m *material.Material) string {
		all, err := m.Issuers()
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, i := range all {
			text := strconv.Itoa(len(i.Services))
			if i.Newest {
				text += "*"
			}
			out = append(out, text)
		}
		return strings.Join(out, " ")
	}
	if got := issuers(beside); got != "4*" {
		t.Errorf("at first the issuers are %s", got)
	}
	if err := beside.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	if got := issuers(beside); got != "4 0*" {
		t.Errorf("with a next one the issuers are %s", got)
	}
	if err := running.ForgetIssuers(); !errors.Is(err, material.ErrInUse) {
		t.Errorf("an issuer in use is forgotten: %v", err)
	}
	for _, m := range []*material.Material{running, beside} {
		renewed, err := m.Renew()
		if err != nil || renewed != (m == running) {
			t.Errorf("renewed %v, %v", renewed, err)
		}
		if got := issuers(m); got != "0 4*" {
			t.Errorf("after the renewal the issuers are %s", got)
		}
	}
	chain, err := pki.LoadStore(beside.Identity(material.NodeAPI), beside.Identity(material.NodeAPI))
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := pki.ParseChain(chain.Certificate().Certificate)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"localhost", "127.0.0.1", "mesh.example", "192.0.2.7", "2001:db8::7"} {
		if err := leaf[0].VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	if err := beside.ForgetIssuers(); err != nil {
		t.Fatal(err)
	}
	if got := issuers(beside); got != "4*" {
		t.Errorf("at the end the issuers are %s", got)
	}
	// The files of retired roots may be removed, and the next root has a number of its own.
	first := filepath.Join(running.ServiceCADir(), "root.pem")
	if err := os.Remove(first); err != nil {
		t.Fatal(err)
	}
	if err := beside.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	if got := issuers(beside); got != "4 0*" {
		t.Errorf("with a third one the issuers are %s", got)
	}
	if _, err := os.Stat(first); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a first root was made again: %v", err)
	}
}

// TestANextIssuerIsGivenToAll: a call that ended before each service was given the issuer is repeated, and makes no
// other.
func TestANextIssuerIsGivenToAll(t *testing.T) {
	t.Parallel()
	m, err := material.Make(material.Config{Dir: t.TempDir(), TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(m.Trust(material.Lifecycle))
	if err != nil {
		t.Fatal(err)
	}
	if err := m.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	given, err := os.ReadFile(m.Trust(material.Lifecycle))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.Trust(material.Lifecycle), before, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	if again, err := os.ReadFile(m.Trust(material.Lifecycle)); err != nil || string(again) != string(given) {
		t.Errorf("%v: lifecycle is given other issuers than by the first call", err)
	}
	if err := m.NextIssuer(); !errors.Is(err, material.ErrUnused) {
		t.Errorf("a third issuer is made: %v", err)
	}
}

// TestAMissingKeyIsNoNewIssuer: where the key of the issuer was taken away, no service would trust certificates of
// another one.
func TestAMissingKeyIsNoNewIssuer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	m, err := material.Make(material.Config{Dir: dir, TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(m.ServiceCADir(), "root.pem")); err != nil {
		t.Fatal(err)
	}
	before := contents(t, dir)
	_, openErr := material.Open(dir)
	_, makeErr := material.Make(material.Config{Dir: dir, TrustDomain: domain})
	_, renewErr := m.Renew()
	for what, err := range map[string]error{
		"open": openErr, "make": makeErr, "renew": renewErr, "next": m.NextIssuer(),
		"forget": m.ForgetIssuers(),
	} {
		if err == nil || !strings.Contains(err.Error(), "root.pem") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if diff := cmp.Diff(before, contents(t, dir)); diff != "" {
		t.Errorf("files changed: %s", diff)
	}
}

// TestFilesKeepTheOwnerOfTheirDirectory: the containers' services do not run as root, which changes their issuer.
func TestFilesKeepTheOwnerOfTheirDirectory(t *testing.T) {
	t.Parallel()
	uid := os.Geteuid()
	if uid == 0 {
		uid = 65534 // only root gives files away
	}
	dir := t.TempDir()
	m, err := material.Make(material.Config{Dir: dir, TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, uid))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.NextIssuer(); err != nil {
		t.Fatal(err)
	}
	if renewed, err := m.Renew(); err != nil || !renewed {
		t.Fatalf("renewed %v, %v", renewed, err)
	}
	for _, path := range []string{m.ServiceRoots(), m.Identity(material.NodeAPI), m.Trust(material.Lifecycle)} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := st.Sys().(*syscall.Stat_t).Uid; int(got) != uid {
			t.Errorf("%s belongs to %d", path, got)
		}
	}
}

func TestConnectionStrings(t *testing.T) {
	t.Parallel()
	m, err := material.Make(material.Config{Dir: t.TempDir(), TrustDomain: domain})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Connect(material.Database{
		URL:     "postgres:///postgres?host=/tmp/x&port=5",
		Tenants: "postgres://127.0.0.1:5/postgres",
	}); err != nil {
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
