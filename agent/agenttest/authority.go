// Package agenttest makes what the agent's tests need of a mesh: an authority whose certificates last as long as a test says, with any clock.
//
// It is linked by tests only. It believes every request: it must never sign outside a test.
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

// TrustDomain is that of all identities made here.
const TrustDomain = "mesh.test"

// Authority signs for tests.
type Authority struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next atomic.Int64
}

// NewAuthority makes a root that is valid around now.
func NewAuthority(name string, now time.Time) (*Authority, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: now.Add(-48 * time.Hour), NotAfter: now.Add(1000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make root: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	a := &Authority{Cert: cert, key: key}
	a.next.Store(100)
	return a, nil
}

// Bundle is the root as a trust bundle.
func (a *Authority) Bundle() *pki.Bundle {
	b := new(pki.Bundle)
	_ = b.Set(a.Cert) // refuses only what is no authority, and this is one
	return b
}

// PEM spells the root.
func (a *Authority) PEM() []byte { return pki.EncodeCertificates([]*x509.Certificate{a.Cert}) }

// Sign issues a certificate for id and answers it in DER. Each has a serial of its own.
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

// Pair issues a certificate with a new key.
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

// SignCSR issues a node's certificate for a request, as PEM.
func (a *Authority) SignCSR(csr []byte, nodeID string, from, to time.Time) ([]byte, error) {
	request, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return nil, fmt.Errorf("read request: %w", err)
	}
	if err := request.CheckSignature(); err != nil {
		return nil, fmt.Errorf("check request: %w", err)
	}
	der, err := a.Sign(pki.NodeID(TrustDomain, nodeID), request.PublicKey, from, to)
	if err != nil {
		return nil, err
	}
	return pki.EncodeChain([][]byte{der}), nil
}
