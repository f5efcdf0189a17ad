package ca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"path/filepath"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

const (
	rootLife         = 10 * 365 * 24 * time.Hour
	intermediateLife = 5 * 365 * 24 * time.Hour
	// caBackdate makes an authority look older than it is: leaves are backdated by a minute, and a verifier that checks a
	// chain at the leaf's beginning refuses a leaf that begins before its issuer does.
	caBackdate = time.Hour
	// maxPathLen is the path length of roots: it leaves room for the cross certificates of later roots.
	maxPathLen = 8
)

// Names of the files of an authority's directory.
const (
	rootFile         = "root.pem"
	intermediateFile = "intermediate.pem"
	provisionerFile  = "provisioner.pem"
	lockFile         = ".lock"
	// RootsFile holds the root alone, without its key, for distribution to peers.
	RootsFile = "roots.pem"
)

// authorityPair is an authority's certificate with its key.
type authorityPair struct {
	cert *x509.Certificate
	key  crypto.Signer
}

// loadOrCreatePair reads a pair from path, or makes it, signed by parent (nil: by itself). The caller holds the
// directory's lock.
func loadOrCreatePair(path, name string, life time.Duration, parent *authorityPair) (*authorityPair, error) {
	found, err := pki.Exists(path)
	if err != nil {
		return nil, err
	}
	if !found {
		if err := createPair(path, name, life, parent); err != nil {
			return nil, err
		}
	}
	pair, _, err := readPair(path)
	if err != nil {
		return nil, err
	}
	if parent != nil {
		if err := pair.cert.CheckSignatureFrom(parent.cert); err != nil {
			return nil, fmt.Errorf("read %s: not signed by the root beside it: %w", path, err)
		}
	}
	return pair, nil
}

// createPair makes a pair, signed by parent (nil: by itself), and writes it with the certificates behind it.
func createPair(path, name string, life time.Duration, parent *authorityPair, behind ...[]byte) error {
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	serial, err := newSerial()
	if err != nil {
		return err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-caBackdate), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, BasicConstraintsValid: true, IsCA: true,
		MaxPathLen: maxPathLen,
	}
	issuer, issuerKey := template, crypto.Signer(key)
	if parent != nil {
		template.MaxPathLen, template.MaxPathLenZero = 0, true
		template.NotAfter = earlier(template.NotAfter, parent.cert.NotAfter)
		issuer, issuerKey = parent.cert, parent.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, key.Public(), issuerKey)
	if err != nil {
		return fmt.Errorf("create authority: %w", err)
	}
	return pki.WriteIdentity(path, key, append([][]byte{der}, behind...))
}

// crossSign issues a certificate for the key and name of a root, by the root before it.
func crossSign(root *x509.Certificate, by *authorityPair) (*x509.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, RawSubject: root.RawSubject, SubjectKeyId: root.SubjectKeyId, NotBefore: root.NotBefore,
		NotAfter: by.cert.NotAfter, KeyUsage: root.KeyUsage, BasicConstraintsValid: true, IsCA: true,
		MaxPathLen: root.MaxPathLen,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, by.cert, root.PublicKey, by.key)
	if err != nil {
		return nil, fmt.Errorf("create cross certificate: %w", err)
	}
	cross, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read cross certificate: %w", err)
	}
	return cross, nil
}

func loadOrCreateProvisioner(path string) (*ecdsa.PrivateKey, error) {
	found, err := pki.Exists(path)
	if err != nil {
		return nil, err
	}
	if !found {
		key, err := pki.NewKey()
		if err != nil {
			return nil, err
		}
		encoded, err := pki.EncodeKey(key)
		if err != nil {
			return nil, err
		}
		if err := pki.WriteFile(path, encoded); err != nil {
			return nil, err
		}
	}
	return loadProvisioner(path)
}

func loadProvisioner(path string) (*ecdsa.PrivateKey, error) {
	data, err := pki.ReadFile(path)
	if err != nil {
		return nil, err
	}
	signer, err := pki.DecodeKey(data)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	key, ok := signer.(*ecdsa.PrivateKey)
	if !ok {
		return nil, errors.New("read provisioner key: not an ECDSA key")
	}
	return key, nil
}

// writeRoots writes the public root beside the keys unless the file exists, whatever it holds.
func writeRoots(dir string, root *x509.Certificate) error {
	path := filepath.Join(dir, RootsFile)
	if found, err := pki.Exists(path); err != nil || found {
		return err
	}
	return pki.WriteFile(path, pki.EncodeCertificates([]*x509.Certificate{root}))
}

func newSerial() (*big.Int, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("draw serial: %w", err)
	}
	return serial.Add(serial, big.NewInt(1)), nil
}
