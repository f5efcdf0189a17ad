package pki_test

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net/url"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
)

// checkClaim checks the bounds of a claim, whatever it was read from.
func checkClaim(t *testing.T, c pki.Claim) {
	t.Helper()
	for _, s := range []string{c.SAN, c.Serial, c.Issuer, c.Validity, c.ID.Name, c.ID.TrustDomain} {
		if len(s) > 300 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("claim of %d bytes, or not printable: %.80q", len(s), s)
		}
	}
	if !c.ID.IsZero() && c.ID.Validate() != nil {
		t.Errorf("claims %v, which is no identity", c.ID)
	}
}

func FuzzReadClaim(f *testing.F) {
	f.Add([]byte(nil), []byte(nil))
	f.Fuzz(func(t *testing.T, leaf, other []byte) {
		var certs []*x509.Certificate
		for _, der := range [][]byte{leaf, other} {
			if cert, err := x509.ParseCertificate(der); err == nil {
				certs = append(certs, cert)
			}
		}
		checkClaim(t, pki.ReadClaim(certs))
	})
}

// FuzzReadClaimOfNames fuzzes the names alone: they are what a peer chooses most freely.
func FuzzReadClaimOfNames(f *testing.F) {
	f.Add("spiffe://mesh.test/node/n", "", []byte{0x30, 0})
	f.Add("spiffe://mesh.test/node/\x00", "spiffe://mesh.test/node/n", []byte{0x30, 0x84, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, one, two string, extension []byte) {
		cert := &x509.Certificate{RawIssuer: []byte(one), RawSubject: []byte(two)}
		for _, text := range []string{one, two} {
			if u, err := url.Parse(text); err == nil && text != "" {
				cert.URIs = append(cert.URIs, u)
			}
		}
		cert.Extensions = append(cert.Extensions, subjectAltName(extension))
		checkClaim(t, pki.ReadClaim([]*x509.Certificate{cert, {RawSubject: []byte(one), Raw: extension}}))
	})
}

// TestReadClaim checks what is read of certificates that were refused.
func TestReadClaim(t *testing.T) {
	nodes := newAuthority(t, "nodes")
	id := pki.NodeID(td, "n1")
	leaf := func(edit func(*x509.Certificate)) *x509.Certificate {
		return nodes.issue(t, id, edit).Certificate().Leaf
	}
	other := pki.NodeID(td, "n2").URL()
	for name, c := range map[string]struct {
		certs  []*x509.Certificate
		id     pki.ID
		san    string
		issuer string
	}{
		"nothing":          {},
		"a node's":         {certs: []*x509.Certificate{leaf(nil)}, id: id, san: id.String()},
		"with its issuer":  {[]*x509.Certificate{leaf(nil), nodes.cert}, id, id.String(), pki.Fingerprint(nodes.cert)},
		"with another":     {certs: []*x509.Certificate{leaf(nil), newAuthority(t, "x").cert}, id: id, san: id.String()},
		"without any name": {certs: []*x509.Certificate{leaf(func(c *x509.Certificate) { c.URIs = nil })}},
		"with two names": {
			certs: []*x509.Certificate{leaf(func(c *x509.Certificate) { c.URIs = append(c.URIs, other) })},
			san:   id.String() + "," + other.String(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := pki.ReadClaim(c.certs)
			checkClaim(t, got)
			if got.ID != c.id || got.SAN != c.san || got.Issuer != c.issuer {
				t.Errorf("claim %+v", got)
			}
			if len(c.certs) > 0 && got.Serial != pki.SerialString(c.certs[0].SerialNumber) {
				t.Errorf("serial %q", got.Serial)
			}
		})
	}
	huge := leaf(func(c *x509.Certificate) {
		for i := range 2000 {
			c.URIs = append(c.URIs, pki.NodeID(td, strings.Repeat("a", i%100+1)).URL())
		}
	})
	if got := pki.ReadClaim([]*x509.Certificate{huge}); !got.ID.IsZero() || !strings.HasPrefix(got.SAN, id.String()) {
		t.Errorf("of 2001 names: %+v", got)
	} else {
		checkClaim(t, got)
	}
}

// subjectAltName returns the extension of names with the given content.
func subjectAltName(content []byte) pkix.Extension {
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: content}
}
