// Package nodeapitest makes what nodeapi needs around it, for its tests and for the benches: authorities, and a control
// plane that keeps sessions in memory behind the real ports.
//
// It believes every request: it must never serve or sign outside a test or a bench.
package nodeapitest

import (
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

// TrustDomain of the meshes made here.
const TrustDomain = "mesh.test"

// Authority is a certificate authority that signs every request.
type Authority struct {
	Cert *x509.Certificate
	key  crypto.Signer
	next atomic.Int64
}

// NewAuthority makes a root that is valid around now.
func NewAuthority(name string) (*Authority, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-48 * time.Hour),
		NotAfter: time.Now().Add(1000 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make root: %w", err)
	}
	a := &Authority{key: key}
	a.next.Store(1 << 40) // serials of about the length that real ones have
	if a.Cert, err = x509.ParseCertificate(der); err != nil {
		return nil, fmt.Errorf("read root: %w", err)
	}
	return a, nil
}

// Encode returns the authority with its key in a form that DecodeAuthority reads, for another process of the same
// bench.
func (a *Authority) Encode() ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	raw, err := json.Marshal([2][]byte{a.Cert.Raw, der})
	if err != nil {
		return nil, fmt.Errorf("encode authority: %w", err)
	}
	return raw, nil
}

// DecodeAuthority returns the authority that Encode encoded.
func DecodeAuthority(raw []byte) (*Authority, error) {
	var parts [2][]byte
	if err := json.Unmarshal(raw, &parts); err != nil {
		return nil, fmt.Errorf("decode authority: %w", err)
	}
	cert, err := x509.ParseCertificate(parts[0])
	if err != nil {
		return nil, fmt.Errorf("decode authority: %w", err)
	}
	key, err := x509.ParsePKCS8PrivateKey(parts[1])
	if err != nil {
		return nil, fmt.Errorf("decode authority: %w", err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("decode authority: the key cannot sign")
	}
	a := &Authority{Cert: cert, key: signer}
	a.next.Store(1 << 41)
	return a, nil
}

// Leaf describes a certificate to issue. The zero value is a node's, valid for an hour.
type Leaf struct {
	URIs      []string
	Common    string
	From, To  time.Time
	Usage     x509.ExtKeyUsage // default: client
	DNS       []string
	Authority bool
}

// Issue signs a certificate with a new key.
func (a *Authority) Issue(l Leaf) (tls.Certificate, error) {
	l = config.Or(l, Leaf{
		From: time.Now().Add(-time.Minute), To: time.Now().Add(time.Hour), Usage: x509.ExtKeyUsageClientAuth,
	})
	key, err := pki.NewKey()
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.next.Add(1)), Subject: pkix.Name{CommonName: l.Common}, NotBefore: l.From, NotAfter: l.To,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{l.Usage}, DNSNames: l.DNS, IsCA: l.Authority,
		BasicConstraintsValid: l.Authority,
	}
	for _, text := range l.URIs {
		u, err := url.Parse(text)
		if err != nil {
			return tls.Certificate{}, fmt.Errorf("parse name: %w", err)
		}
		template.URIs = append(template.URIs, u)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, key.Public(), a.key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("sign: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("read leaf: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

// Node issues a node's certificate.
func (a *Authority) Node(nodeID string) (tls.Certificate, error) {
	return a.Issue(Leaf{URIs: []string{pki.NodeID(TrustDomain, nodeID).String()}})
}

// Service issues a service's certificate, good on both sides of a connection.
func (a *Authority) Service(name string) (*pki.Store, error) {
	key, chain, err := a.service(name)
	if err != nil {
		return nil, err
	}
	return pki.NewStore(key, chain)
}

func (a *Authority) service(name string) (crypto.Signer, [][]byte, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, nil, fmt.Errorf("make key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(a.next.Add(1)), NotBefore: time.Now().Add(-time.Minute),
		NotAfter: time.Now().Add(24 * time.Hour), URIs: []*url.URL{pki.ServiceID(TrustDomain, name).URL()},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("sign: %w", err)
	}
	return key, [][]byte{der}, nil
}

// Bundle returns the root as a trust bundle.
func (a *Authority) Bundle() (*pki.Bundle, error) {
	return pki.NewBundle(a.Cert)
}

// Files are the paths of a service's own certificate and key, and of the authorities that it trusts.
type Files struct{ Cert, Key, ServiceCA, NodeCA string }

// WriteFiles puts a service's certificate and both roots into dir.
func WriteFiles(dir, service string, nodes, services *Authority) (Files, error) {
	f := Files{
		Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"),
		ServiceCA: filepath.Join(dir, "services.pem"), NodeCA: filepath.Join(dir, "nodes.pem"),
	}
	key, chain, err := services.service(service)
	if err != nil {
		return f, err
	}
	keyPEM, err := pki.EncodeKey(key)
	if err != nil {
		return f, fmt.Errorf("encode key: %w", err)
	}
	for path, data := range map[string][]byte{
		f.Cert: pki.EncodeChain(chain), f.Key: keyPEM,
		f.ServiceCA: pki.EncodeCertificates([]*x509.Certificate{services.Cert}),
		f.NodeCA:    pki.EncodeCertificates([]*x509.Certificate{nodes.Cert}),
	} {
		if err := pki.WriteFile(path, data); err != nil {
			return f, fmt.Errorf("write material: %w", err)
		}
	}
	return f, nil
}
