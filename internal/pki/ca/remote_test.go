package ca_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/pki/ca/catest"
	"github.com/gpuaas/mesh/internal/ports"
	"github.com/gpuaas/mesh/internal/testkit"
)

// process exports the authority of a directory and runs it as step-ca; it returns a client.
func process(t *testing.T, cfg ca.ExportConfig) *ca.Remote {
	t.Helper()
	addrs, err := ports.Free(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Out, cfg.Address, cfg.Names = filepath.Join(t.TempDir(), "step"), addrs[0], []string{"127.0.0.1"}
	files, err := ca.Export(cfg)
	if err != nil {
		t.Fatal(err)
	}
	catest.Start(t, files.Config)
	remote, err := ca.Dial(ca.RemoteConfig{
		URL: "https://" + addrs[0], RootsPath: files.Root, ProvisionerPath: files.Provisioner, TrustDomain: td,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remote.Close(); err != nil {
			t.Error(err)
		}
	})
	testkit.Eventually(t, testkit.Patience, func() error {
		_, err := remote.Roots(t.Context())
		return err
	})
	return remote
}

// Scenario: the embedded authority is exported, and step-ca runs with what was exported. The process signs with the
// same issuer, and its certificates pass the same checks. After a rotation the issuer to export must be named.
func TestAStepCAProcessSignsAsTheAuthorityThatWasExported(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	embedded, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := embedded.Close(); err != nil {
			t.Error(err)
		}
	}()
	signing, err := embedded.SigningFingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	check := func(remote *ca.Remote, signing string, roots int) {
		t.Helper()
		csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // each attempt mints a token of its own
			issued, err := sign(t, remote, csr, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			certs, err := pki.ParseChain(issued.Chain)
			if err != nil {
				t.Fatal(err)
			}
			fingerprint, err := remote.SigningFingerprint(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if len(certs) != 2 || fingerprint != signing || pki.Fingerprint(certs[1]) != signing {
				t.Errorf("chain of %d, signed by %s, want %s", len(certs), fingerprint, signing)
			}
		}
		if list, err := remote.Roots(t.Context()); err != nil || len(list) != roots {
			t.Errorf("%d roots, %v", len(list), err)
		}
	}
	check(process(t, ca.ExportConfig{Dir: dir}), signing, 1)

	next, err := embedded.Prepare(ids.New(), true)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := ca.ExportConfig{
		Dir: dir, Out: filepath.Join(t.TempDir(), "x"), Address: "127.0.0.1:1", Names: []string{"ca"},
	}
	if _, err := ca.Export(elsewhere); !errors.Is(err, ca.ErrManyIssuers) {
		t.Errorf("an export of one of two issuers: %v", err)
	}
	check(process(t, ca.ExportConfig{Dir: dir, Issuer: pki.Fingerprint(next.Certificate)}),
		pki.Fingerprint(next.Certificate), 1)
}

// Scenario: the process is down. Its client says that the authority is unavailable.
func TestADeadStepCAProcessIsUnavailable(t *testing.T) {
	testkit.IO(t)
	dir := t.TempDir()
	embedded, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	if err := embedded.Close(); err != nil {
		t.Fatal(err)
	}
	addrs, err := ports.Free(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	remote, err := ca.Dial(ca.RemoteConfig{
		URL: "https://" + addrs[0], RootsPath: filepath.Join(dir, ca.RootsFile),
		ProvisionerPath: filepath.Join(dir, ca.ProvisionerFile), TrustDomain: td,
	})
	if err != nil {
		t.Fatal(err)
	}
	csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sign(t, remote, csr, time.Hour); !fault.Has(err,
		commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE) {
		t.Errorf("a dead authority: %v", err)
	}
}

// A refused request leaves nothing behind, and no key of the root or of the provisioner leaves the directory.
func TestExportRefuses(t *testing.T) {
	testkit.IO(t)
	dir, out := t.TempDir(), filepath.Join(t.TempDir(), "out")
	good := ca.ExportConfig{Dir: dir, Out: out, Address: "127.0.0.1:8443", Names: []string{"ca.mesh.test"}}
	refused := func(name, want string, change func(*ca.ExportConfig)) {
		t.Helper()
		cfg := good
		change(&cfg)
		if _, err := ca.Export(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the directory was made: %v", name, err)
		}
	}
	refused("an empty directory", "root.pem is not there", func(*ca.ExportConfig) {})
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Fatalf("an export of nothing made %v, %v", left, err)
	}
	embedded, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	if err := embedded.Close(); err != nil {
		t.Fatal(err)
	}
	refused("no port", "address of the process", func(c *ca.ExportConfig) { c.Address = "127.0.0.1" })
	refused("no name", "no name", func(c *ca.ExportConfig) { c.Names = nil })
	refused("an unknown issuer", "no file", func(c *ca.ExportConfig) { c.Issuer = "ab" })
	if _, err := ca.Export(good); err != nil {
		t.Fatal(err)
	}
	if _, err := ca.Export(good); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second export into one directory: %v", err)
	}
	secret, err := os.ReadFile(filepath.Join(dir, ca.ProvisionerFile))
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(out, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), strings.Split(string(secret), "\n")[1]) {
			t.Errorf("%s has the provisioner's key", f.Name())
		}
		if info, err := f.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f.Name(), info.Mode(), err)
		}
	}
}
