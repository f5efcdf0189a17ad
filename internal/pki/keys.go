package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
)

const (
	blockCertificate = "CERTIFICATE"
	blockPrivateKey  = "PRIVATE KEY"
	// maxFileSize bounds the read of a file that another program may have written.
	maxFileSize = 1 << 20
)

// NewKey makes an ECDSA P-256 key.
func NewKey() (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	return key, nil
}

// NewCSR makes a certificate request with the key's proof of possession. It names exactly one identity; the authority
// decides everything else. The result is DER.
func NewCSR(key crypto.Signer, id ID) ([]byte, error) {
	if err := id.Validate(); err != nil {
		return nil, err
	}
	template := x509.CertificateRequest{Subject: pkix.Name{CommonName: id.Name}}
	template.URIs = append(template.URIs, id.URL())
	der, err := x509.CreateCertificateRequest(rand.Reader, &template, key)
	if err != nil {
		return nil, fmt.Errorf("make certificate request: %w", err)
	}
	return der, nil
}

// NewAnonymousCSR makes a certificate request without a name, for an instance that does not yet know its node id.
func NewAnonymousCSR(key crypto.Signer) ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("make certificate request: %w", err)
	}
	return der, nil
}

// EncodeKey returns a private key as PEM (PKCS #8).
func EncodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: blockPrivateKey, Bytes: der}), nil
}

// DecodeKey reads the first PKCS #8 private key of PEM data.
func DecodeKey(data []byte) (crypto.Signer, error) {
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != blockPrivateKey {
			continue
		}
		parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("decode key: %w", err)
		}
		key, ok := parsed.(crypto.Signer)
		if !ok {
			return nil, errors.New("decode key: it cannot sign")
		}
		return key, nil
	}
	return nil, errors.New("decode key: no private key found")
}

// EncodeChain returns DER certificates as PEM, in order.
func EncodeChain(chain [][]byte) []byte {
	var out []byte
	for _, der := range chain {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: blockCertificate, Bytes: der})...)
	}
	return out
}

// EncodeCertificates returns certificates as PEM, in order.
func EncodeCertificates(certs []*x509.Certificate) []byte {
	chain := make([][]byte, 0, len(certs))
	for _, cert := range certs {
		chain = append(chain, cert.Raw)
	}
	return EncodeChain(chain)
}

// DecodeCertificates reads all certificates of PEM data, in order. It is an error if there is none.
func DecodeCertificates(data []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for block, rest := pem.Decode(data); block != nil; block, rest = pem.Decode(rest) {
		if block.Type != blockCertificate {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("decode certificate: %w", err)
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, errors.New("decode certificates: none found")
	}
	return certs, nil
}

// ParseChain parses DER certificates, leaf first.
func ParseChain(chain [][]byte) ([]*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, errors.New("parse chain: it is empty")
	}
	certs := make([]*x509.Certificate, 0, len(chain))
	for _, der := range chain {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("parse chain: %w", err)
		}
		certs = append(certs, cert)
	}
	return certs, nil
}

// WriteIdentity writes key and chain (DER, leaf first) as one file, atomically and durably.
func WriteIdentity(path string, key crypto.Signer, chain [][]byte) error {
	encoded, err := EncodeKey(key)
	if err != nil {
		return err
	}
	return WriteFile(path, append(encoded, EncodeChain(chain)...))
}

// LoadOrCreateSigningKey reads the Ed25519 key at path, or makes it under the lock path+".lock", so that replicas which
// share the directory agree.
func LoadOrCreateSigningKey(path string) (ed25519.PrivateKey, error) {
	var key ed25519.PrivateKey
	err := WithLock(path+".lock", func() error {
		found, err := Exists(path)
		if err != nil {
			return err
		}
		if !found {
			_, fresh, err := ed25519.GenerateKey(rand.Reader)
			if err != nil {
				return fmt.Errorf("make signing key: %w", err)
			}
			encoded, err := EncodeKey(fresh)
			if err != nil {
				return err
			}
			if err := WriteFile(path, encoded); err != nil {
				return err
			}
		}
		key, err = LoadSigningKey(path)
		return err
	})
	if err != nil {
		return nil, err
	}
	return key, nil
}

// LoadSigningKey reads the Ed25519 key at path.
func LoadSigningKey(path string) (ed25519.PrivateKey, error) {
	data, err := ReadFile(path)
	if err != nil {
		return nil, err
	}
	signer, err := DecodeKey(data)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	key, ok := signer.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("read %s: not an Ed25519 key", path)
	}
	return key, nil
}

// ReadFile reads a file of at most 1 MiB.
func ReadFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("look at file: %w", err)
	}
	if info.Size() > maxFileSize {
		return nil, fmt.Errorf("read %s: larger than %d bytes", path, maxFileSize)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read file: %w", err)
	}
	return data, nil
}
