package material

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// ErrNone is wrapped by the errors of Open for a directory that holds no material.
var ErrNone = errors.New("no issuer of services stands in this directory")

// Open opens the issuer of services of a directory that Make has filled, to change it while services use it. The trust
// domain and the hosts of its certificates are those of the present certificates. It makes no key, and reads no
// passwords.
func Open(dir string) (*Material, error) {
	l := Layout{Dir: dir}
	switch _, err := os.Stat(l.ServiceRoots()); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("open material: %w: %s", ErrNone, dir)
	case err != nil:
		return nil, fmt.Errorf("open material: %w", err)
	}
	leaf, err := leafOf(l.Identity(Recovery))
	if err != nil {
		return nil, fmt.Errorf("open material: the certificate of %s: %w", Recovery, err)
	}
	if len(leaf.URIs) != 1 {
		return nil, fmt.Errorf("open material: the certificate of %s names %d identities", Recovery, len(leaf.URIs))
	}
	id, err := pki.ParseID(leaf.URIs[0].String())
	if err != nil {
		return nil, fmt.Errorf("open material: the certificate of %s: %w", Recovery, err)
	}
	m := &Material{Layout: l, cfg: Config{
		Dir: dir, TrustDomain: id.TrustDomain, Hosts: hostsOf(leaf), TTL: DefaultTTL,
		Now: time.Now,
	}}
	if m.services, err = ca.OpenServiceCA(m.ServiceCADir(), id.TrustDomain, m.cfg.Hosts...); err != nil {
		return nil, fmt.Errorf("open material: %w", err)
	}
	return m, nil
}

func leafOf(path string) (*x509.Certificate, error) {
	data, err := pki.ReadFile(path)
	if err != nil {
		return nil, err
	}
	chain, err := pki.DecodeCertificates(data)
	if err != nil {
		return nil, err
	}
	return chain[0], nil
}

// hostsOf returns the names and addresses of a certificate without those that every certificate has.
func hostsOf(leaf *x509.Certificate) []string {
	hosts := slices.DeleteFunc(slices.Clone(leaf.DNSNames), func(name string) bool { return name == "localhost" })
	for _, ip := range leaf.IPAddresses {
		if !ip.Equal(net.IPv4(127, 0, 0, 1)) && !ip.Equal(net.IPv6loopback) {
			hosts = append(hosts, ip.String())
		}
	}
	return hosts
}

// Issuer is a root of services' certificates that services trust.
type Issuer struct {
	// ID is the id in `gpuaas keys list`.
	ID       string
	NotAfter time.Time
	// Newest reports whether certificates are issued by it.
	Newest bool
	// Services are those whose certificates it has issued.
	Services []string
}

// Issuers lists the issuers that services are given, the newest last.
func (m *Material) Issuers() ([]Issuer, error) {
	bundle, err := m.services.Bundle()
	if err != nil {
		return nil, fmt.Errorf("list issuers of services: %w", err)
	}
	roots, _ := bundle.Given()
	var out []Issuer
	for _, root := range roots {
		issuer := Issuer{ID: pki.RootID(root), NotAfter: root.NotAfter, Newest: root.Equal(m.services.Root())}
		for _, service := range Services() {
			leaf, err := leafOf(m.Identity(service))
			if err != nil {
				return nil, fmt.Errorf("list issuers of services: the certificate of %s: %w", service, err)
			}
			if leaf.CheckSignatureFrom(root) == nil {
				issuer.Services = append(issuer.Services, service)
			}
		}
		out = append(out, issuer)
	}
	slices.SortStableFunc(out, func(a, b Issuer) int { return a.NotAfter.Compare(b.NotAfter) })
	return out, nil
}

// Renew replaces the certificates of services that are near their end, or were issued by an issuer before the newest,
// and reports whether it replaced any. The services reload them by themselves.
func (m *Material) Renew() (bool, error) {
	renewed := false
	err := pki.WithLock(filepath.Join(m.Dir, ".lock"), func() error {
		if err := m.services.Reload(); err != nil { // another process may have made the next issuer
			return err
		}
		var err error
		renewed, err = m.renewLocked()
		return err
	})
	if err != nil {
		return renewed, fmt.Errorf("renew certificates of services: %w", err)
	}
	return renewed, nil
}

// ErrUnused is wrapped by the errors of NextIssuer while the newest issuer has issued nothing.
var ErrUnused = errors.New("has issued no certificate yet")

// NextIssuer makes the next issuer of services and adds it to what services and agents' profiles trust. The next Renew
// makes certificates by it: a running service presents its new one once each replica and connected agent trusts the
// issuer. After an interrupted call the caller repeats it: an issuer that not all services were given is given to them,
// and no other is made.
func (m *Material) NextIssuer() error {
	return m.issuers(func() error {
		if err := m.services.Reload(); err != nil {
			return err
		}
		used, given := false, true
		for _, service := range Services() {
			leaf, err := leafOf(m.Identity(service))
			if err != nil {
				return fmt.Errorf("the certificate of %s: %w", service, err)
			}
			used = used || leaf.CheckSignatureFrom(m.services.Root()) == nil
			trust, err := pki.LoadBundle(m.Trust(service))
			if err != nil {
				return fmt.Errorf("the issuers of %s: %w", service, err)
			}
			given = given && slices.ContainsFunc(trust.Roots(), m.services.Root().Equal)
		}
		switch {
		case used:
			return m.services.Next()
		case given:
			return fmt.Errorf("the issuer %s %w", pki.RootID(m.services.Root()), ErrUnused)
		default:
			return nil // its call did not end
		}
	})
}

// ErrInUse is wrapped by the errors of ForgetIssuers while a certificate of an earlier issuer stands in the files.
var ErrInUse = errors.New("has a certificate of an earlier issuer")

// ForgetIssuers removes the issuers before the newest from the files that services and profiles are given. It is called
// after the control plane has retired them, when services have ceased to trust them: an earlier call would cut off at
// once every service that presents a certificate of such an issuer. It refuses while the files hold such a certificate.
func (m *Material) ForgetIssuers() error {
	return m.issuers(func() error {
		if err := m.services.Reload(); err != nil {
			return err
		}
		for _, service := range Services() {
			leaf, err := leafOf(m.Identity(service))
			if err != nil {
				return fmt.Errorf("the certificate of %s: %w", service, err)
			}
			if leaf.CheckSignatureFrom(m.services.Root()) != nil {
				return fmt.Errorf("%s %w", service, ErrInUse)
			}
		}
		return m.services.Forget()
	})
}

func (m *Material) issuers(change func() error) error {
	err := pki.WithLock(filepath.Join(m.Dir, ".lock"), func() error {
		if err := change(); err != nil {
			return err
		}
		for _, service := range Services() {
			if err := pki.WriteFile(m.Trust(service), pki.EncodeCertificates(m.services.Roots())); err != nil {
				return fmt.Errorf("give %s the issuers: %w", service, err)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("change issuers of services: %w", err)
	}
	return nil
}

// renewLocked replaces the certificates that are not good, and reports whether it replaced any. The caller holds the
// directory's lock.
func (m *Material) renewLocked() (bool, error) {
	renewed := false
	for _, service := range Services() {
		if m.good(service) {
			continue
		}
		renewed = true
		if err := m.issue(service); err != nil {
			return renewed, err
		}
	}
	return renewed, nil
}

func (m *Material) issue(service string) error {
	if err := m.services.IssueToDir(service, filepath.Dir(m.Identity(service)), m.cfg.TTL); err != nil {
		return fmt.Errorf("issue certificate of %s: %w", service, err)
	}
	return nil
}

// good reports whether a service's certificate is of this issuer, names it and every host, and has time left.
func (m *Material) good(service string) bool {
	leaf, err := leafOf(m.Identity(service))
	if err != nil {
		return false
	}
	trust, err := pki.LoadBundle(m.Trust(service))
	if err != nil || !slices.ContainsFunc(trust.Roots(), m.services.Root().Equal) {
		return false
	}
	if leaf.CheckSignatureFrom(m.services.Root()) != nil {
		return false
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != pki.ServiceID(m.cfg.TrustDomain, service).String() {
		return false
	}
	for _, host := range m.cfg.Hosts {
		if leaf.VerifyHostname(host) != nil {
			return false
		}
	}
	return leaf.NotAfter.Sub(m.cfg.Now()) > leaf.NotAfter.Sub(leaf.NotBefore)/renewShare
}
