package pki

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"
)

// ServicesKind is the kind of the issuers of services' certificates.
const ServicesKind = "services"

// maxCrosses bounds the cross certificates that are presented beside a leaf.
const maxCrosses = 4

// RootID returns the id of a root: the first 16 hexadecimal digits of its fingerprint.
func RootID(root *x509.Certificate) string { return Fingerprint(root)[:16] }

// RootLink is a root of a list. A root but the first one has a cross certificate: one for its key that an earlier root
// has issued.
type RootLink struct {
	DER     []byte
	Cross   []byte
	Retired bool // certificates that it issued are not trusted; it may vouch for later roots
}

// Vouches reports whether cross is a certificate for the key and name of root that by has issued.
func Vouches(by, root, cross *x509.Certificate) bool {
	return cross.IsCA && bytes.Equal(cross.RawSubjectPublicKeyInfo, root.RawSubjectPublicKeyInfo) &&
		bytes.Equal(cross.RawSubject, root.RawSubject) && cross.CheckSignatureFrom(by) == nil
}

// FollowRoots returns the known roots and those of the list that follow from them by cross certificates, over any
// number of steps. Roots that the list calls retired are in the result. A link that cannot be read is passed over.
func FollowRoots(known []*x509.Certificate, links []RootLink) []*x509.Certificate {
	out := slices.Clone(known)
	for more := true; more; {
		more = false
		for _, link := range links {
			root, err := x509.ParseCertificate(link.DER)
			if err != nil || !root.IsCA || slices.ContainsFunc(out, root.Equal) {
				continue
			}
			cross, err := x509.ParseCertificate(link.Cross)
			if err != nil {
				continue
			}
			if slices.ContainsFunc(out, func(by *x509.Certificate) bool { return Vouches(by, root, cross) }) {
				out, more = append(out, root), true
			}
		}
	}
	return out
}

// Anchor returns the root that a chain (leaf first) ends in without a cross certificate. The time is the beginning of
// the leaf's life, so that an expired leaf has an anchor too.
func Anchor(chain, roots []*x509.Certificate) (*x509.Certificate, error) {
	if len(chain) == 0 {
		return nil, errors.New("find issuer: no certificate")
	}
	var last error
	for _, root := range roots {
		opts := x509.VerifyOptions{
			Roots: x509.NewCertPool(), Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
			CurrentTime: chain[0].NotBefore.Add(time.Second),
		}
		opts.Roots.AddCert(root)
		for _, cert := range chain[1:] {
			if !slices.ContainsFunc(roots, func(other *x509.Certificate) bool { return sameKey(other, cert) }) {
				opts.Intermediates.AddCert(cert)
			}
		}
		if _, err := chain[0].Verify(opts); err != nil {
			last = err
			continue
		}
		return root, nil
	}
	return nil, fmt.Errorf("find issuer of the certificate: %w", last)
}

// CrossChain returns the cross certificates that lead from a root back to those before it, the nearest first.
func CrossChain(root *x509.Certificate, links []RootLink) [][]byte {
	var out [][]byte
	for at := root; len(out) < maxCrosses; {
		i := slices.IndexFunc(links, func(link RootLink) bool { return bytes.Equal(link.DER, at.Raw) && len(link.Cross) > 0 })
		if i < 0 {
			return out
		}
		out = append(out, links[i].Cross)
		cross, err := x509.ParseCertificate(links[i].Cross)
		if err != nil {
			return out[:len(out)-1]
		}
		by := slices.IndexFunc(links, func(link RootLink) bool {
			before, err := x509.ParseCertificate(link.DER)
			return err == nil && !before.Equal(at) && cross.CheckSignatureFrom(before) == nil
		})
		if by < 0 {
			return out
		}
		at, _ = x509.ParseCertificate(links[by].DER) // it was parsed a moment ago
	}
	return out
}

func sameKey(a, b *x509.Certificate) bool {
	return bytes.Equal(a.RawSubjectPublicKeyInfo, b.RawSubjectPublicKeyInfo)
}

// splitCrosses separates the cross certificates of a file from its roots. A cross certificate is one for the key of a
// self-signed root in the same file.
func splitCrosses(certs []*x509.Certificate) ([]*x509.Certificate, []*x509.Certificate) {
	var roots, crosses []*x509.Certificate
	for _, cert := range certs {
		isCross := !selfIssued(cert) &&
			slices.ContainsFunc(certs, func(root *x509.Certificate) bool { return selfIssued(root) && sameKey(root, cert) })
		if isCross {
			crosses = append(crosses, cert)
		} else if !slices.ContainsFunc(roots, cert.Equal) {
			roots = append(roots, cert)
		}
	}
	return roots, crosses
}

func selfIssued(cert *x509.Certificate) bool {
	return bytes.Equal(cert.RawIssuer, cert.RawSubject) && cert.CheckSignatureFrom(cert) == nil
}
