// Package agenttest has what the tests of the agent need: an authority that issues certificates of any validity, by any
// clock, and a handler that catches lines of the log.
//
// Only tests link it. It signs every request, so it must never be used outside a test.
package agenttest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// TrustDomain is the trust domain of identities made here, unless their authority has another.
const TrustDomain = "mesh.test"

// Authority signs for tests.
type Authority struct {
	Cert   *x509.Certificate
	Domain string // of nodes; TrustDomain at first
	key    *ecdsa.PrivateKey
	next   atomic.Int64
}

// NewAuthority returns an authority whose root is valid around now.
func NewAuthority(name string, now time.Time) (*Authority, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-48 * time.Hour),
		NotAfter: now.Add(1000 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make root: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	a := &Authority{Cert: cert, Domain: TrustDomain, key: key}
	a.next.Store(100)
	return a, nil
}

// Bundle returns the root as a trust bundle.
func (a *Authority) Bundle() *pki.Bundle {
	b := new(pki.Bundle)
	_ = b.Set(a.Cert) // Set refuses only certificates that are no authority's, and this one is
	return b
}

// PEM returns the root in PEM.
func (a *Authority) PEM() []byte { return pki.EncodeCertificates([]*x509.Certificate{a.Cert}) }

// Sign issues a certificate for id and returns it in DER. Each has a serial of its own.
func (a *Authority) Sign(id pki.ID, pub crypto.PublicKey, from, to time.Time) ([]byte, error) {
	usage := x509.ExtKeyUsageClientAuth
	if id.Kind == pki.KindService {
		usage = x509.ExtKeyUsageServerAuth
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.next.Add(1)), NotBefore: from, NotAfter: to, URIs: []*url.URL{id.URL()},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, pub, a.key)
	if err != nil {
		return nil, fmt.Errorf("sign: %w", err)
	}
	return der, nil
}

// Pair issues a certificate with a new key and returns both.
func (a *Authority) Pair(id pki.ID, from, to time.Time) (*tls.Certificate, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	der, err := a.Sign(id, key.Public(), from, to)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read leaf: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// SignCSR issues a node's certificate for a request and returns it in PEM.
func (a *Authority) SignCSR(csr []byte, nodeID string, from, to time.Time) ([]byte, error) {
	request, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("check request: %w", err)
	}
	der, err := a.Sign(pki.NodeID(a.Domain, nodeID), request.PublicKey, from, to)
	if err != nil {
		return nil, err
	}
	return pki.EncodeChain([][]byte{der}), nil
}
