package pki

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Store holds the certificate and key that this process presents, and replaces them without a restart. It is safe for
// concurrent use.
type Store struct {
	certPath, keyPath string
	current           atomic.Pointer[tls.Certificate]

	// mu guards the fields below, and each change of current.
	mu      sync.Mutex
	crosses func(leaf []*x509.Certificate) [][]byte                         // see Follow
	admit   func(next []*x509.Certificate, present *x509.Certificate) error // see Follow
	plain   *tls.Certificate                                                // without crosses
}

// Follow makes the store present, behind its chain, the cross certificates that crosses returns for it. If admit
// refuses a chain that Reload finds, the store keeps the present certificate. Follow applies to the present chain at
// once.
func (s *Store) Follow(crosses func(chain []*x509.Certificate) [][]byte,
	admit func(next []*x509.Certificate, present *x509.Certificate) error,
) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.crosses, s.admit = crosses, admit
	if s.plain == nil {
		return nil
	}
	return s.showLocked(s.plain)
}

// Chain returns the certificates that the store presents, without cross certificates, leaf first.
func (s *Store) Chain() ([]*x509.Certificate, error) {
	s.mu.Lock()
	plain := s.plain
	s.mu.Unlock()
	if plain == nil {
		return nil, errors.New("read own certificate: none is loaded")
	}
	return ParseChain(plain.Certificate)
}

// Path returns the file of the certificate, or the empty string if it is in memory only.
func (s *Store) Path() string { return s.certPath }

// showLocked makes the store present a pair with its cross certificates.
func (s *Store) showLocked(pair *tls.Certificate) error {
	shown := *pair
	if s.crosses != nil {
		chain, err := ParseChain(pair.Certificate)
		if err != nil {
			return err
		}
		shown.Certificate = slices.Clone(pair.Certificate)
		for _, cross := range s.crosses(chain) {
			if !slices.ContainsFunc(shown.Certificate, func(der []byte) bool { return bytes.Equal(der, cross) }) {
				shown.Certificate = append(shown.Certificate, cross)
			}
		}
	}
	s.plain = pair
	s.current.Store(&shown)
	return nil
}

// LoadStore reads a PEM chain and its key. Both paths may name one file. The files are read again only by Reload or
// Watch.
func LoadStore(certPath, keyPath string) (*Store, error) {
	s := &Store{certPath: certPath, keyPath: keyPath}
	if _, err := s.Reload(); err != nil {
		return nil, err
	}
	return s, nil
}

// NewStore returns a store of a key and its DER chain in memory.
func NewStore(key any, chain [][]byte) (*Store, error) {
	s := new(Store)
	if err := s.Set(key, chain); err != nil {
		return nil, err
	}
	return s, nil
}

// StoreOf returns a store of a key and its chain in memory. A leaf that pair has parsed already is not parsed again.
func StoreOf(pair *tls.Certificate) (*Store, error) {
	if pair.Leaf == nil {
		return NewStore(pair.PrivateKey, pair.Certificate)
	}
	s := new(Store)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.showLocked(pair); err != nil {
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
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.showLocked(&tls.Certificate{Certificate: chain, PrivateKey: key, Leaf: certs[0]})
}

// Certificate returns the certificate that the store presents now.
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
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.plain != nil && bytes.Equal(s.plain.Certificate[0], pair.Certificate[0]) {
		return false, nil
	}
	if s.plain != nil && s.admit != nil {
		chain, err := ParseChain(pair.Certificate)
		if err != nil {
			return false, err
		}
		if err := s.admit(chain, s.plain.Leaf); err != nil {
			return false, fmt.Errorf("the certificate in %s is not used: %w", s.certPath, err)
		}
	}
	return true, s.showLocked(&pair)
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
//
// A cross certificate in it, one for the key of a root that stands beside it, is no root: it verifies no chain, and
// Crosses returns it.
type Bundle struct {
	path    string
	current atomic.Pointer[bundleState]

	mu      sync.Mutex // guards the fields below, and each change of current
	given   []*x509.Certificate
	crosses []*x509.Certificate
	follow  func(given []*x509.Certificate) []*x509.Certificate // see Follow
}

// LoadBundle reads roots from a PEM file. An empty or unreadable file is an error: an empty set of roots would refuse
// every peer, and the system's roots would trust strangers.
func LoadBundle(path string) (*Bundle, error) {
	b := &Bundle{path: path}
	if _, err := b.Reload(); err != nil {
		return nil, err
	}
	return b, nil
}

// NewBundle returns a bundle of roots in memory.
func NewBundle(roots ...*x509.Certificate) (*Bundle, error) {
	b := new(Bundle)
	if err := b.Set(roots...); err != nil {
		return nil, err
	}
	return b, nil
}

// Set replaces the roots for all handshakes that begin from now on.
func (b *Bundle) Set(roots ...*x509.Certificate) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.setLocked(roots)
}

func (b *Bundle) setLocked(certs []*x509.Certificate) error {
	for _, cert := range certs {
		if !cert.IsCA {
			return fmt.Errorf("set trust bundle: %s is not an authority", Fingerprint(cert))
		}
	}
	given, crosses := splitCrosses(certs)
	trusted := given
	if b.follow != nil {
		trusted = b.follow(given)
	}
	if len(trusted) == 0 {
		return errors.New("set trust bundle: it is empty")
	}
	state := &bundleState{certs: trusted, pool: x509.NewCertPool(), pem: EncodeCertificates(trusted)}
	for _, root := range trusted {
		state.pool.AddCert(root)
	}
	b.given, b.crosses = given, crosses
	b.current.Store(state)
	return nil
}

// Follow makes the bundle trust what follow returns for the roots that it was given, now and after each change of its
// file.
func (b *Bundle) Follow(follow func(given []*x509.Certificate) []*x509.Certificate) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	was := b.follow
	b.follow = follow
	if err := b.setLocked(append(slices.Clone(b.given), b.crosses...)); err != nil {
		b.follow = was
		return err
	}
	return nil
}

// Given returns the roots and the cross certificates that the bundle was given, by its file or Set.
func (b *Bundle) Given() ([]*x509.Certificate, []*x509.Certificate) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.given), slices.Clone(b.crosses)
}

// Path returns the file of the bundle, or the empty string if it is in memory only.
func (b *Bundle) Path() string { return b.path }

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
	b.mu.Lock()
	defer b.mu.Unlock()
	given, crosses := splitCrosses(certs)
	same := func(x, y []*x509.Certificate) bool { return slices.EqualFunc(x, y, (*x509.Certificate).Equal) }
	if b.current.Load() != nil && same(given, b.given) && same(crosses, b.crosses) {
		return false, nil
	}
	return true, b.setLocked(certs)
}

// Roots returns the certificates trusted now.
func (b *Bundle) Roots() []*x509.Certificate { return b.current.Load().certs }

// Pool returns the pool trusted now. The caller must not change it.
func (b *Bundle) Pool() *x509.CertPool { return b.current.Load().pool }

// PEM returns the roots trusted now as PEM.
func (b *Bundle) PEM() []byte { return bytes.Clone(b.current.Load().pem) }

// Fingerprints returns the fingerprints of the roots trusted now, in file order.
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

// Watch reloads all given reloaders every interval until ctx ends, and logs changes and failures. It reads the files
// instead of relying on a file system's change notifications: they are a few kilobytes.
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
				logger.LogAttrs(ctx, slog.LevelError, "reloading trust material failed, the previous stays in use",
					slog.Any("error", err))
			case changed:
				logger.LogAttrs(ctx, slog.LevelInfo, "trust material reloaded")
			}
		}
	}
}
