package ca

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// ServiceCA issues the certificates of services from a root of its own, the newest of its directory. It is for dev,
// tests and meshes without another issuer of service certificates; services need only the files that it writes.
type ServiceCA struct {
	trustDomain string
	dir         string
	root        *authorityPair // the newest
	given       []*x509.Certificate
	// hosts are DNS names and addresses beside localhost that issued certificates carry.
	hosts []string
}

// OpenServiceCA opens the service authority of a directory, and creates its root if it is not there. hosts are put into
// every certificate beside localhost, 127.0.0.1 and ::1.
func OpenServiceCA(dir, trustDomain string, hosts ...string) (*ServiceCA, error) {
	if err := pki.ServiceID(trustDomain, "x").Validate(); err != nil {
		return nil, fmt.Errorf("open service authority: %w", err)
	}
	s := &ServiceCA{trustDomain: trustDomain, dir: dir, hosts: hosts}
	if err := pki.WithLock(filepath.Join(dir, lockFile), s.loadLocked); err != nil {
		return nil, fmt.Errorf("open service authority: %w", err)
	}
	return s, nil
}

// Reload reads the directory again, which another process may have changed: its newest root issues from now on.
func (s *ServiceCA) Reload() error {
	if err := pki.WithLock(filepath.Join(s.dir, lockFile), s.loadLocked); err != nil {
		return fmt.Errorf("read service authority: %w", err)
	}
	return nil
}

// nextRoots matches the files of the roots after the first.
const nextRoots = "root-*.pem"

// errNoKey is returned if the key of a root that was distributed is not in the directory.
var errNoKey = errors.New("the key of the root is missing")

// loadLocked reads the newest root, or makes the first, and the file of roots. A newest root that the file lacks is
// added with its cross certificate: it comes from a call of Next that did not complete. The first is made only if no
// root was distributed: no service would trust certificates of another one. The caller holds the directory's lock.
func (s *ServiceCA) loadLocked() error {
	paths, err := s.rootPaths()
	if err != nil {
		return err
	}
	newest := len(paths) - 1
	given, err := pki.Exists(filepath.Join(s.dir, RootsFile))
	if err != nil {
		return err
	}
	if given {
		if err := keyStands(paths[newest]); err != nil {
			return err
		}
	}
	if s.root, err = s.pair(paths[newest]); err != nil {
		return err
	}
	if err := writeRoots(s.dir, s.root.cert); err != nil {
		return err
	}
	if err := s.readRoots(); err != nil {
		return err
	}
	if newest == 0 || slices.ContainsFunc(s.given, s.root.cert.Equal) {
		return nil
	}
	if err := keyStands(paths[newest-1]); err != nil { // it signs the cross certificate
		return err
	}
	before, err := s.pair(paths[newest-1])
	if err != nil {
		return err
	}
	cross, err := crossSign(s.root.cert, before)
	if err != nil {
		return err
	}
	return s.writeRoots(append(slices.Clone(s.given), s.root.cert, cross))
}

func keyStands(path string) error {
	found, err := pki.Exists(path)
	if err == nil && !found {
		err = fmt.Errorf("%s: %w", path, errNoKey)
	}
	return err
}

// rootPaths returns the files of the roots in the order in which they were made.
func (s *ServiceCA) rootPaths() ([]string, error) {
	later, err := filepath.Glob(filepath.Join(s.dir, nextRoots))
	if err != nil {
		return nil, fmt.Errorf("list roots: %w", err)
	}
	slices.Sort(later)
	return append([]string{filepath.Join(s.dir, rootFile)}, later...), nil
}

func (s *ServiceCA) pair(path string) (*authorityPair, error) {
	return loadOrCreatePair(path, s.trustDomain+" service root", rootLife, nil)
}

func (s *ServiceCA) readRoots() error {
	bundle, err := pki.LoadBundle(filepath.Join(s.dir, RootsFile))
	if err != nil {
		return err
	}
	roots, crosses := bundle.Given()
	s.given = slices.Concat(roots, crosses)
	return nil
}

// Next makes the next root, which issues certificates from now on, and adds it to the file of roots with a cross
// certificate of the root before: peers that trust only that root come to trust the next one by it.
func (s *ServiceCA) Next() error {
	err := pki.WithLock(filepath.Join(s.dir, lockFile), func() error {
		if err := s.loadLocked(); err != nil {
			return err
		}
		paths, err := s.rootPaths()
		if err != nil {
			return err
		}
		// Files of retired roots may have been removed: the number follows the greatest.
		number := 1
		if _, err := fmt.Sscanf(filepath.Base(paths[len(paths)-1]), "root-%d.pem", &number); err != nil && len(paths) > 1 {
			return fmt.Errorf("number of %s: %w", paths[len(paths)-1], err)
		}
		if _, err := s.pair(filepath.Join(s.dir, fmt.Sprintf("root-%06d.pem", number+1))); err != nil {
			return err
		}
		return s.loadLocked()
	})
	if err != nil {
		return fmt.Errorf("make the next service root: %w", err)
	}
	return nil
}

// Forget removes all roots but the newest from the file of roots. The newest root's cross certificate stays.
func (s *ServiceCA) Forget() error {
	err := pki.WithLock(filepath.Join(s.dir, lockFile), func() error {
		if err := s.loadLocked(); err != nil {
			return err
		}
		var keep []*x509.Certificate
		for _, cert := range s.given {
			if bytes.Equal(cert.RawSubjectPublicKeyInfo, s.root.cert.RawSubjectPublicKeyInfo) {
				keep = append(keep, cert)
			}
		}
		if !slices.ContainsFunc(keep, s.root.cert.Equal) {
			return fmt.Errorf("the file of roots lacks %s", pki.RootID(s.root.cert))
		}
		return s.writeRoots(keep)
	})
	if err != nil {
		return fmt.Errorf("forget former service roots: %w", err)
	}
	return nil
}

func (s *ServiceCA) writeRoots(certs []*x509.Certificate) error {
	if err := pki.WriteFile(filepath.Join(s.dir, RootsFile), pki.EncodeCertificates(certs)); err != nil {
		return err
	}
	s.given = certs
	return nil
}

// Root returns the newest root, which issues.
func (s *ServiceCA) Root() *x509.Certificate { return s.root.cert }

// Roots returns the trusted roots of the service authority, with their cross certificates.
func (s *ServiceCA) Roots() []*x509.Certificate { return slices.Clone(s.given) }

// Bundle returns a bundle of the service authority's roots.
func (s *ServiceCA) Bundle() (*pki.Bundle, error) { return pki.NewBundle(s.given...) }

// Issue issues a certificate for the service of that name and returns a store that presents it. ttl is its life.
func (s *ServiceCA) Issue(name string, ttl time.Duration) (*pki.Store, error) {
	key, chain, err := s.issue(name, ttl)
	if err != nil {
		return nil, err
	}
	return pki.NewStore(key, chain)
}

// IssueToDir writes a certificate for a service to dir: pki.IdentityFile (key and chain) and pki.BundleFile (the
// service root). The bundle is written first, so that a process that reads the identity can also verify its peers.
func (s *ServiceCA) IssueToDir(name, dir string, ttl time.Duration) error {
	key, chain, err := s.issue(name, ttl)
	if err != nil {
		return err
	}
	if err := pki.WriteFile(filepath.Join(dir, pki.BundleFile), pki.EncodeCertificates(s.Roots())); err != nil {
		return err
	}
	return pki.WriteIdentity(filepath.Join(dir, pki.IdentityFile), key, chain)
}

func (s *ServiceCA) issue(name string, ttl time.Duration) (crypto.Signer, [][]byte, error) {
	id := pki.ServiceID(s.trustDomain, name)
	if err := id.Validate(); err != nil {
		return nil, nil, fmt.Errorf("issue service certificate: %w", err)
	}
	if ttl <= 0 {
		return nil, nil, errors.New("issue service certificate: no lifetime")
	}
	key, err := pki.NewKey()
	if err != nil {
		return nil, nil, err
	}
	serial, err := newSerial()
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	leaf := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-pki.Backdate), NotAfter: now.Add(ttl),
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"localhost"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback},
	}
	leaf.URIs = append(leaf.URIs, id.URL())
	for _, host := range s.hosts {
		if ip := net.ParseIP(host); ip != nil {
			leaf.IPAddresses = append(leaf.IPAddresses, ip)
		} else if !slices.Contains(leaf.DNSNames, host) {
			leaf.DNSNames = append(leaf.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, leaf, s.root.cert, key.Public(), s.root.key)
	if err != nil {
		return nil, nil, fmt.Errorf("issue service certificate: %w", err)
	}
	return key, [][]byte{der}, nil
}

// rootsTransport trusts one bundle and nothing else. It verifies host names: a step-ca process is no service of ours.
func rootsTransport(bundle *pki.Bundle) http.RoundTripper {
	return &http.Transport{
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: bundle.Pool()},
		TLSHandshakeTimeout: 5 * time.Second,
		ForceAttemptHTTP2:   true,
	}
}
