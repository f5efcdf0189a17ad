package ca_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

const (
	td       = "mesh.test"
	nodeID   = "0192f0c1-0000-7000-8000-000000000001"
	instance = "0192f0c1-0000-7000-8000-0000000000aa"
)

func open(t *testing.T) *ca.Embedded {
	t.Helper()
	authority, err := ca.Open(ca.Config{Dir: t.TempDir(), TrustDomain: td})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := authority.Close(); err != nil {
			t.Error(err)
		}
	})
	return authority
}

func request(t *testing.T, key crypto.Signer, template *x509.CertificateRequest) []byte {
	t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func p256(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t *testing.T, s ca.Signer, csr []byte, ttl time.Duration) (ca.Issued, error) {
	t.Helper()
	return s.Sign(t.Context(), ca.SignRequest{
		CSR: csr, NodeID: nodeID, NodeInstanceID: instance, Profile: "local",
		TTL: ttl,
	})
}

// issuedHour is a certificate of one hour that an authority of its own has issued to a node.
type issuedHour struct {
	ca.Issued

	authority *ca.Embedded
	roots     []*x509.Certificate
	csr       []byte
}

func issueHour(t *testing.T) issuedHour {
	t.Helper()
	out := issuedHour{authority: open(t)}
	var err error
	if out.csr, err = pki.NewCSR(p256(t), pki.NodeID(td, nodeID)); err != nil {
		t.Fatal(err)
	}
	if out.Issued, err = sign(t, out.authority, out.csr, time.Hour); err != nil {
		t.Fatal(err)
	}
	if out.roots, err = out.authority.Roots(t.Context()); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestIssuedCertificateNamesOneNodeAndNothingElse(t *testing.T) {
	issued := issueHour(t)
	bundle, err := pki.NewBundle(issued.roots...)
	if err != nil {
		t.Fatal(err)
	}
	peer, err := pki.VerifyClientChain(issued.Chain, pki.Trust{Kind: pki.KindNode, Bundle: bundle}, td, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	leaf := peer.Leaf
	if peer.ID != pki.NodeID(td, nodeID) || peer.Serial != issued.Serial {
		t.Errorf("peer = %+v", peer)
	}
	if leaf.KeyUsage != x509.KeyUsageDigitalSignature || len(leaf.ExtKeyUsage) != 1 ||
		leaf.ExtKeyUsage[0] != x509.ExtKeyUsageClientAuth {
		t.Errorf("usage = %v %v", leaf.KeyUsage, leaf.ExtKeyUsage)
	}
	if life := time.Until(leaf.NotAfter); life > time.Hour+time.Second || life < time.Hour-time.Minute {
		t.Errorf("life = %s", life)
	}
	ext, err := extension(leaf)
	if err != nil {
		t.Fatal(err)
	}
	if want := (nodeExtension{NodeID: nodeID, NodeInstanceID: instance, Profile: "local"}); ext != want {
		t.Errorf("extension = %+v", ext)
	}
	fingerprint, err := issued.authority.SigningFingerprint(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if fingerprint != peer.Issuer {
		t.Errorf("signing fingerprint %s, issuer %s", fingerprint, peer.Issuer)
	}
	// A request whose reply was lost is repeated: each attempt has its own token, so the second attempt is not refused as
	// a replay.
	if _, err := sign(t, issued.authority, issued.csr, time.Hour); err != nil {
		t.Errorf("second attempt: %v", err)
	}
}

// Scenario: B10.
func TestRequestsThatAskForMoreAreRefused(t *testing.T) {
	authority := open(t)
	id := pki.NodeID(td, nodeID)
	key := p256(t)
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	if err != nil {
		t.Fatal(err)
	}
	p224, err := ecdsa.GenerateKey(elliptic.P224(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	isCA, err := asn1.Marshal(struct {
		IsCA bool
	}{true})
	if err != nil {
		t.Fatal(err)
	}
	other := pki.NodeID(td, "another").URL()
	good := request(t, key, &x509.CertificateRequest{URIs: []*url.URL{id.URL()}})
	forged := append([]byte(nil), good...)
	forged[len(forged)-1] ^= 1
	tests := []struct {
		name string
		csr  []byte
	}{
		{"another node", request(t, key, &x509.CertificateRequest{URIs: []*url.URL{other}})},
		{"two names", request(t, key, &x509.CertificateRequest{URIs: []*url.URL{id.URL(), other}})},
		{"a service", request(t, key, &x509.CertificateRequest{URIs: []*url.URL{pki.ServiceID(td, "recovery").URL()}})},
		{"dns name", request(t, key, &x509.CertificateRequest{DNSNames: []string{"localhost"}})},
		{"address", request(t, key, &x509.CertificateRequest{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})},
		{"mail address", request(t, key, &x509.CertificateRequest{EmailAddresses: []string{"a@b.c"}})},
		{"common name of another", request(t, key, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "another"}})},
		{"to be an authority", request(t, key, &x509.CertificateRequest{
			ExtraExtensions: []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: isCA}},
		})},
		{"small RSA key", request(t, small, &x509.CertificateRequest{})},
		{"weak curve", request(t, p224, &x509.CertificateRequest{})},
		{"bad proof of possession", forged},
		{"no request", nil},
		{"garbage", []byte("garbage")},
		{"huge", make([]byte, 1<<20)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := sign(t, authority, tt.csr, time.Hour)
			if got := fault.ReasonOf(err); err == nil || got != commonv1.Reason_REASON_CSR_REFUSED {
				t.Errorf("err = %v", err)
			}
		})
	}
	for _, ttl := range []time.Duration{0, time.Second, 25 * time.Hour} {
		if _, err := sign(t, authority, good, ttl); err == nil {
			t.Errorf("a life of %s was signed", ttl)
		}
	}
}

func TestHugeRSAKeyIsRefusedBeforeItIsUsed(t *testing.T) {
	// A real key of this size takes minutes to make; the request needs only its public half and any signature.
	n := new(big.Int).Lsh(big.NewInt(1), 16383)
	n.Add(n, big.NewInt(1))
	spki, err := x509.MarshalPKIXPublicKey(&rsa.PublicKey{N: n, E: 65537})
	if err != nil {
		t.Fatal(err)
	}
	type tbs struct {
		Version    int
		Subject    asn1.RawValue
		PublicKey  asn1.RawValue
		Attributes []asn1.RawValue `asn1:"tag:0,set"`
	}
	empty, err := asn1.Marshal(pkix.RDNSequence{})
	if err != nil {
		t.Fatal(err)
	}
	csr, err := asn1.Marshal(struct {
		TBS tbs
		Alg pkix.AlgorithmIdentifier
		Sig asn1.BitString
	}{
		tbs{Subject: asn1.RawValue{FullBytes: empty}, PublicKey: asn1.RawValue{FullBytes: spki}},
		pkix.AlgorithmIdentifier{
			Algorithm:  asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 1, 11},
			Parameters: asn1.NullRawValue,
		},
		asn1.BitString{Bytes: make([]byte, 2048), BitLength: 2048 * 8},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ca.CheckCSR(csr, pki.NodeID(td, nodeID)); !fault.Has(err, commonv1.Reason_REASON_CSR_REFUSED) {
		t.Errorf("err = %v", err)
	}
}

func TestOtherKeyKindsAreSigned(t *testing.T) {
	authority := open(t)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	p384, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	r2048, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []crypto.Signer{ed, p384, r2048} {
		csr, err := pki.NewAnonymousCSR(key)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := sign(t, authority, csr, time.Hour); err != nil {
			t.Errorf("%T: %v", key, err)
		}
	}
}

func TestInstanceAndProfileCannotBreakOutOfTheTemplate(t *testing.T) {
	authority := open(t)
	csr, err := pki.NewAnonymousCSR(p256(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{`a|b`, `a"},"keyUsage":["certSign"]`, "{{.Token}}", "a b", "ü"} {
		_, err := authority.Sign(t.Context(),
			ca.SignRequest{CSR: csr, NodeID: nodeID, NodeInstanceID: instance, Profile: bad, TTL: time.Hour})
		if !fault.Has(err, commonv1.Reason_REASON_CSR_REFUSED) {
			t.Errorf("profile %q: %v", bad, err)
		}
	}
}

// Scenario: root.pem of the node authority was lost, alone or with one of the files beside it. The authority does not
// start, names the file and what to do, and writes nothing; with the file restored it has the root that it had. Where
// no file of it is left, a new authority is made.
func TestALostRootIsNotMadeAnew(t *testing.T) {
	rootOf := func(dir string) (*x509.Certificate, error) {
		authority, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
		if err != nil {
			return nil, err
		}
		roots, err := authority.Roots(t.Context())
		return roots[0], errors.Join(err, authority.Close())
	}
	files := []string{"intermediate.pem", "provisioner.pem", ca.RootsFile}
	for _, left := range append(files, "") {
		dir := t.TempDir()
		before, err := rootOf(dir)
		if err != nil {
			t.Fatal(err)
		}
		kept := map[string][]byte{}
		for _, name := range append([]string{"root.pem"}, files...) {
			if kept[name], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			if name == left {
				continue
			}
			if err := os.Remove(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		after, err := rootOf(dir)
		if left == "" {
			if err != nil || after.Equal(before) {
				t.Errorf("a directory without files: %v", err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), "root.pem") || !strings.Contains(err.Error(), left) ||
			!strings.Contains(err.Error(), "backup") {
			t.Errorf("with %s left: %v", left, err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 2 { // and the lock
			t.Errorf("with %s left there are %v: %v", left, entries, err)
		}
		for name, data := range kept {
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if after, err := rootOf(dir); err != nil || !after.Equal(before) {
			t.Errorf("restored: %v", err)
		}
	}
}

// Scenario: provisioner.pem and intermediate.pem of the node authority were lost while a replica runs, and another
// replica starts and makes new ones. No token outlives the call that it was made for, and a certificate comes with its
// intermediate: both replicas sign, under the root that peers trust.
func TestOnlyTheRootCannotBeMadeAnew(t *testing.T) {
	dir := t.TempDir()
	start := func() *ca.Embedded {
		authority, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := authority.Close(); err != nil {
				t.Error(err)
			}
		})
		return authority
	}
	before := start()
	for _, name := range []string{ca.ProvisionerFile, "intermediate.pem"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	after := start()
	bundle, err := pki.LoadBundle(filepath.Join(dir, ca.RootsFile))
	if err != nil {
		t.Fatal(err)
	}
	for name, authority := range map[string]*ca.Embedded{"that runs": before, "that starts": after} {
		csr, err := pki.NewCSR(p256(t), pki.NodeID(td, nodeID))
		if err != nil {
			t.Fatal(err)
		}
		issued, err := sign(t, authority, csr, time.Hour)
		if err != nil {
			t.Errorf("the replica %s: %v", name, err)
			continue
		}
		if _, err := pki.VerifyClientChain(issued.Chain, pki.Trust{Kind: pki.KindNode, Bundle: bundle}, td,
			time.Now()); err != nil {
			t.Errorf("the replica %s: %v", name, err)
		}
	}
}

func TestReplicasThatStartTogetherShareOneAuthority(t *testing.T) {
	dir := t.TempDir()
	const replicas = 6
	fingerprints := make([]string, replicas)
	var wg sync.WaitGroup
	for i := range replicas {
		wg.Go(func() {
			authority, err := ca.Open(ca.Config{Dir: dir, TrustDomain: td})
			if err != nil {
				t.Error(err)
				return
			}
			if fingerprints[i], err = authority.SigningFingerprint(t.Context()); err != nil {
				t.Error(err)
			}
			if err := authority.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, got := range fingerprints {
		if got != fingerprints[0] {
			t.Errorf("replicas made different authorities: %v", fingerprints)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", entry.Name(), info.Mode())
		}
	}
}

func TestServiceAuthorityIsNotTheNodeAuthority(t *testing.T) {
	services, err := ca.OpenServiceCA(t.TempDir(), td, "10.0.0.7", "recovery.internal")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := services.IssueToDir("recovery", dir, time.Hour); err != nil {
		t.Fatal(err)
	}
	identity := filepath.Join(dir, pki.IdentityFile)
	store, err := pki.LoadStore(identity, identity)
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := pki.LoadBundle(filepath.Join(dir, pki.BundleFile))
	if err != nil {
		t.Fatal(err)
	}
	peer, err := pki.VerifyClientChain(store.Certificate().Certificate, pki.Trust{Kind: pki.KindService, Bundle: bundle},
		td, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if peer.ID != pki.ServiceID(td, "recovery") {
		t.Errorf("peer = %s", peer.ID)
	}
	for _, host := range []string{"localhost", "127.0.0.1", "10.0.0.7", "recovery.internal"} {
		if err := peer.Leaf.VerifyHostname(host); err != nil {
			t.Error(err)
		}
	}
	nodes, err := open(t).Roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	nodeBundle, err := pki.NewBundle(nodes...)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pki.VerifyClientChain(store.Certificate().Certificate, pki.Trust{Kind: pki.KindNode, Bundle: nodeBundle},
		td, time.Now()); err == nil {
		t.Error("the node authority's bundle accepts a service")
	}
}

// extensionID is the object id of the private extension of a node's certificate. The extension is for people and for
// logs; the identity is the URI name alone.
var extensionID = asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 59999, 1, 1}

// nodeExtension is the private extension of a node's certificate.
type nodeExtension struct {
	NodeID, NodeInstanceID, Profile string
}

// extension reads the private extension of a node's certificate.
func extension(cert *x509.Certificate) (nodeExtension, error) {
	for _, ext := range cert.Extensions {
		if !ext.Id.Equal(extensionID) {
			continue
		}
		var text string
		if rest, err := asn1.UnmarshalWithParams(ext.Value, &text, "utf8"); err != nil || len(rest) > 0 {
			return nodeExtension{}, errors.New("read node extension: not a string")
		}
		parts := strings.Split(text, "|")
		if len(parts) != 3 {
			return nodeExtension{}, errors.New("read node extension: not three parts")
		}
		return nodeExtension{NodeID: parts[0], NodeInstanceID: parts[1], Profile: parts[2]}, nil
	}
	return nodeExtension{}, errors.New("read node extension: it is missing")
}
