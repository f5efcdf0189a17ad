package pki

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// Store holds the certificate and key that this process shows, and replaces them without a restart. It is safe for concurrent use.
type Store struct {
	certPath, keyPath string
	current           atomic.Pointer[tls.Certificate]
}

// LoadStore reads a PEM chain and its key. Both paths may name one file. The store must be told to look again: Reload, or Watch.
func LoadStore(certPath, keyPath string) (*Store, error) {
	s := &Store{certPath: certPath, keyPath: keyPath}
	if _, err := s.Reload(); err != nil {
		return nil, err
	}
	return s, nil
}

// NewStore holds a key and its DER chain in memory.
func NewStore(key any, chain [][]byte) (*Store, error) {
	s := new(Store)
	if err := s.Set(key, chain); err != nil {
		return nil, err
	}
	return s, nil
}

// Set replaces the certificate for all connections that begin from now on.
func (s *Store) Set(key any, chain [][]byte) error {
	certs, err := ParseChain(chain)
	if err != nil {
		return err
	}
	s.current.Store(&tls.Certificate{Certificate: chain, PrivateKey: key, Leaf: certs[0]})
	return nil
}

// Certificate is what the store shows now.
func (s *Store) Certificate() *tls.Certificate { return s.current.Load() }

// Reload reads the files again and reports whether the certificate changed. On an error the previous one stays.
func (s *Store) Reload() (bool, error) {
	if s.certPath == "" {
		return false, nil
	}
	certPEM, err := ReadFile(s.certPath)
	if err != nil {
		return false, fmt.Errorf("read certificate: %w", err)
	}
	keyPEM, err := ReadFile(s.keyPath)
	if err != nil {
		return false, fmt.Errorf("read key: %w", err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return false, fmt.Errorf("load key pair: %w", err)
	}
	if old := s.current.Load(); old != nil && bytes.Equal(old.Certificate[0], pair.Certificate[0]) {
		return false, nil
	}
	s.current.Store(&pair)
	return true, nil
}

func (s *Store) getCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if cert := s.current.Load(); cert != nil {
		return cert, nil
	}
	return nil, errors.New("no certificate loaded")
}

func (s *Store) getClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return s.getCertificate(nil)
}

type bundleState struct {
	certs []*x509.Certificate
	pool  *x509.CertPool
	pem   []byte
}

// Bundle is a set of roots that may be replaced while connections use it. It is safe for concurrent use.
type Bundle struct {
	path    string
	current atomic.Pointer[bundleState]
}

// LoadBundle reads roots from a PEM file. An empty or unreadable file is an error: trusting nobody by accident is an outage, and trusting the
// system's roots is worse.
func LoadBundle(path string) (*Bundle, error) {
	b := &Bundle{path: path}
	if _, err := b.Reload(); err != nil {
		return nil, err
	}
	return b, nil
}

// NewBundle holds roots in memory.
func NewBundle(roots ...*x509.Certificate) (*Bundle, error) {
	b := new(Bundle)
	if err := b.Set(roots...); err != nil {
		return nil, err
	}
	return b, nil
}

// Set replaces the roots for all handshakes that begin from now on.
func (b *Bundle) Set(roots ...*x509.Certificate) error {
	if len(roots) == 0 {
		return errors.New("set trust bundle: it is empty")
	}
	state := &bundleState{certs: roots, pool: x509.NewCertPool(), pem: EncodeCertificates(roots)}
	for _, root := range roots {
		if !root.IsCA {
			return fmt.Errorf("set trust bundle: %s is not an authority", Fingerprint(root))
		}
		state.pool.AddCert(root)
	}
	b.current.Store(state)
	return nil
}

// Reload reads the file again and reports whether the roots changed. On an error the previous ones stay.
func (b *Bundle) Reload() (bool, error) {
	if b.path == "" {
		return false, nil
	}
	data, err := ReadFile(b.path)
	if err != nil {
		return false, fmt.Errorf("read trust bundle: %w", err)
	}
	certs, err := DecodeCertificates(data)
	if err != nil {
		return false, fmt.Errorf("read trust bundle: %w", err)
	}
	if old := b.current.Load(); old != nil && bytes.Equal(old.pem, EncodeCertificates(certs)) {
		return false, nil
	}
	return true, b.Set(certs...)
}

// Roots are the certificates trusted now.
func (b *Bundle) Roots() []*x509.Certificate { return b.current.Load().certs }

// Pool is the pool trusted now. It must not be changed.
func (b *Bundle) Pool() *x509.CertPool { return b.current.Load().pool }

// PEM spells the roots trusted now.
func (b *Bundle) PEM() []byte { return bytes.Clone(b.current.Load().pem) }

// Fingerprints are those of the roots trusted now, in file order.
func (b *Bundle) Fingerprints() []string {
	roots := b.Roots()
	out := make([]string, 0, len(roots))
	for _, root := range roots {
		out = append(out, Fingerprint(root))
	}
	return out
}

// Reloader is a Store or a Bundle.
type Reloader interface {
	Reload() (changed bool, err error)
}

// Watch reloads all of what it is given every interval until ctx ends, and logs changes and failures. Reading a few kilobytes is cheaper than
// being wrong about a file system's change notifications.
func Watch(ctx context.Context, logger *slog.Logger, every time.Duration, what ...Reloader) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		for _, r := range what {
			changed, err := r.Reload()
			switch {
			case err != nil:
				logger.LogAttrs(ctx, slog.LevelError, "reloading trust material failed, the previous stays in use", slog.Any("error", err))
			case changed:
				logger.LogAttrs(ctx, slog.LevelInfo, "trust material reloaded")
			}
		}
	}
}
