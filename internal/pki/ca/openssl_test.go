package ca_test

import (
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
)

// openssl runs another implementation of X.509 on our certificates and returns what it printed.
func openssl(t *testing.T, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "openssl", args...).CombinedOutput()
	return string(out), err
}

func writePEM(t *testing.T, ders ...[]byte) string {
	t.Helper()
	var text []byte
	for _, der := range ders {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	}
	path := filepath.Join(t.TempDir(), "certificates.pem")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Another implementation reads in a node's certificate what we write, accepts its chain for a client alone, and refuses
// it once it has ended and under another authority.
func TestOpenSSLReadsOurCertificates(t *testing.T) {
	issued := issueHour(t)
	foreign, err := open(t).Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	leaf := writePEM(t, issued.Chain[0])
	trusted, other := writePEM(t, issued.roots[0].Raw), writePEM(t, foreign[0].Raw)
	chain := writePEM(t, issued.Chain[1:]...)

	shown, err := openssl(t, "x509", "-in", leaf, "-noout", "-serial", "-ext",
		"subjectAltName,keyUsage,extendedKeyUsage,basicConstraints")
	if err != nil {
		t.Fatalf("%v: %s", err, shown)
	}
	for _, want := range []string{
		"URI:" + pki.NodeID(td, nodeID).String(), "Digital Signature\n", "TLS Web Client Authentication\n",
	} {
		if !strings.Contains(shown, want) {
			t.Errorf("it reads no %q:\n%s", want, shown)
		}
	}
	if got := strings.Count(shown, "URI:") + strings.Count(shown, "DNS:") + strings.Count(shown, "IP Address:"); got != 1 {
		t.Errorf("it reads %d names:\n%s", got, shown)
	}
	_, serial, _ := strings.Cut(shown, "serial=")
	serial, _, _ = strings.Cut(serial, "\n")
	if got := strings.TrimLeft(strings.ToLower(serial), "0"); got != issued.Serial {
		t.Errorf("serial %s, ours is %s", got, issued.Serial)
	}

	verify := func(root string, more ...string) (string, error) {
		t.Helper()
		return openssl(t, append(append([]string{"verify", "-x509_strict", "-CAfile", root, "-untrusted", chain}, more...),
			leaf)...)
	}
	if out, err := verify(trusted, "-purpose", "sslclient"); err != nil {
		t.Errorf("a client: %v: %s", err, out)
	}
	for name, args := range map[string][]string{
		"a server":        {trusted, "-purpose", "sslserver"},
		"after its end":   {trusted, "-purpose", "sslclient", "-attime", "4102444800"}, // 2100-01-01
		"of another mesh": {other, "-purpose", "sslclient"},
	} {
		if out, err := verify(args[0], args[1:]...); err == nil {
			t.Errorf("%s: accepted: %s", name, out)
		}
	}
	if out, err := openssl(t, "verify", "-CAfile", trusted, leaf); err == nil {
		t.Errorf("without its issuer: accepted: %s", out)
	}
}
