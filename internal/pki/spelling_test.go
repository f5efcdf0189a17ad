package pki_test

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/testkit"
)

// Tags of a GeneralName.
const (
	tagOther = 0
	tagEmail = 1
	tagDNS   = 2
	tagURI   = 6
	tagIP    = 7
	tagRID   = 8
)

type generalName struct {
	tag         int
	value       string
	constructed bool
}

func uri(s string) generalName { return generalName{tag: tagURI, value: s} }

// san encodes a subject alternative name as no library would.
func san(t *testing.T, names ...generalName) pkix.Extension {
	t.Helper()
	raw := make([]asn1.RawValue, 0, len(names))
	for _, n := range names {
		raw = append(raw, asn1.RawValue{
			Class: asn1.ClassContextSpecific, Tag: n.tag, IsCompound: n.constructed,
			Bytes: []byte(n.value),
		})
	}
	value, err := asn1.Marshal(raw)
	if err != nil {
		t.Fatal(err)
	}
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}
}

// TestOneSpellingOfAName shakes hands with certificates of an authority that is trusted, whose names differ from the
// one spelling in a byte that a parser of URLs forgives, or that carry something beside it.
func TestOneSpellingOfAName(t *testing.T) {
	testkit.IO(t)
	nodes, services := newAuthority(t, "nodes"), newAuthority(t, "services")
	p := serve(t, pki.ServerConfig{
		Store: services.issue(t, pki.ServiceID(td, "nodeapi"), nil), TrustDomain: td,
		Clients: []pki.Trust{{Kind: pki.KindNode, Bundle: nodes.bundle(t)}},
	})
	id := pki.NodeID(td, "node-a")
	good := id.String()
	named := func(names ...generalName) func(*x509.Certificate) {
		return func(c *x509.Certificate) { c.ExtraExtensions = append(c.ExtraExtensions, san(t, names...)) }
	}
	usage := func(known []x509.ExtKeyUsage, unknown ...asn1.ObjectIdentifier) func(*x509.Certificate) {
		return func(c *x509.Certificate) {
			c.ExtKeyUsage = known
			c.UnknownExtKeyUsage = append(c.UnknownExtKeyUsage, unknown...)
		}
	}
	client := x509.ExtKeyUsageClientAuth
	tests := []struct {
		name   string
		edit   func(*x509.Certificate)
		reject pki.RejectReason // empty: let in
	}{
		{"the one spelling", named(uri(good)), ""},
		{"scheme in capitals", named(uri("SPIFFE" + strings.TrimPrefix(good, "spiffe"))), pki.RejectIdentity},
		{"scheme mixed", named(uri("Spiffe" + strings.TrimPrefix(good, "spiffe"))), pki.RejectIdentity},
		{"trust domain in capitals", named(uri("spiffe://" + strings.ToUpper(td) + "/node/node-a")), pki.RejectIdentity},
		{"empty fragment", named(uri(good + "#")), pki.RejectIdentity},
		{"fragment", named(uri(good + "#x")), pki.RejectIdentity},
		{"empty query", named(uri(good + "?")), pki.RejectIdentity},
		{"query", named(uri(good + "?a=b")), pki.RejectIdentity},
		{"escaped letter", named(uri("spiffe://" + td + "/node/%6eode-a")), pki.RejectIdentity},
		{"escaped slash", named(uri("spiffe://" + td + "/node%2Fnode-a")), pki.RejectIdentity},
		{"slash at the end", named(uri(good + "/")), pki.RejectIdentity},
		{"two slashes", named(uri("spiffe://" + td + "//node/node-a")), pki.RejectIdentity},
		{"a dot segment", named(uri("spiffe://" + td + "/node/./node-a")), pki.RejectIdentity},
		{"empty port", named(uri("spiffe://" + td + ":/node/node-a")), pki.RejectIdentity},
		{"a port", named(uri("spiffe://" + td + ":443/node/node-a")), pki.RejectIdentity},
		{"empty user", named(uri("spiffe://@" + td + "/node/node-a")), pki.RejectIdentity},
		{"the name twice", named(uri(good), uri(good)), pki.RejectIdentity},
		{"an address too", named(uri(good), generalName{tag: tagIP, value: "\x7f\x00\x00\x01"}), pki.RejectIdentity},
		{"a mail address too", named(uri(good), generalName{tag: tagEmail, value: "a@b.test"}), pki.RejectIdentity},
		{"a host name first", named(generalName{tag: tagDNS, value: "host.test"}, uri(good)), pki.RejectIdentity},
		{"a registered id too", named(uri(good), generalName{tag: tagRID, value: "\x2a\x03"}), pki.RejectIdentity},
		{
			"another kind of name too",
			named(uri(good), generalName{tag: tagOther, constructed: true, value: "\x06\x03\x2a\x03\x04\xa0\x03\x0c\x01x"}),
			pki.RejectIdentity,
		},
		{"client authentication only", usage([]x509.ExtKeyUsage{client}), ""},
		{"server authentication too", usage([]x509.ExtKeyUsage{client, x509.ExtKeyUsageServerAuth}), pki.RejectWrongUsage},
		{"client authentication twice", usage([]x509.ExtKeyUsage{client, client}), pki.RejectWrongUsage},
		{"any usage too", usage([]x509.ExtKeyUsage{client, x509.ExtKeyUsageAny}), pki.RejectWrongUsage},
		{"code signing too", usage([]x509.ExtKeyUsage{client, x509.ExtKeyUsageCodeSigning}), pki.RejectWrongUsage},
		{
			"an unknown usage too", usage([]x509.ExtKeyUsage{client}, asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 99999, 1}),
			pki.RejectWrongUsage,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := pki.ClientTLS(pki.ClientConfig{
				Store: nodes.issue(t, id, tt.edit), Roots: services.bundle(t), Server: pki.ServiceID(td, "nodeapi"),
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := dial(t, p.addr, cfg); err != nil {
				t.Fatal(err)
			}
			select {
			case peer := <-p.peers:
				if tt.reject != "" || peer.ID != id {
					t.Errorf("let in as %v, wanted %q", peer.ID, tt.reject)
				}
			case got := <-p.rejects:
				if got.Reason != tt.reject {
					t.Errorf("refused as %q (%v), wanted %q", got.Reason, got.Err, tt.reject)
				}
			}
		})
	}
}

// TestServicesKeepTheirUsages lets a service's certificate serve both sides, and nothing else.
func TestServicesKeepTheirUsages(t *testing.T) {
	services := newAuthority(t, "services")
	id := pki.ServiceID(td, "recovery")
	both := []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	for name, tt := range map[string]struct {
		known   []x509.ExtKeyUsage
		unknown []asn1.ObjectIdentifier
		ok      bool
	}{
		"both":         {both, nil, true},
		"client alone": {both[1:], nil, true},
		"code signing": {append(both[:2:2], x509.ExtKeyUsageCodeSigning), nil, false},
		"any":          {append(both[:2:2], x509.ExtKeyUsageAny), nil, false},
		"unknown":      {both, []asn1.ObjectIdentifier{{1, 3, 6, 1, 4, 1, 99999, 1}}, false},
	} {
		leaf := services.issue(
			t, id, func(c *x509.Certificate) { c.ExtKeyUsage, c.UnknownExtKeyUsage = tt.known, tt.unknown },
		).Certificate().Leaf
		_, err := pki.PeerFromChain([][]*x509.Certificate{{leaf, services.cert}}, td, x509.ExtKeyUsageClientAuth)
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzOneSpelling mints a name of any bytes: whatever is taken for an identity is that identity's one spelling.
func FuzzOneSpelling(f *testing.F) {
	for _, s := range []string{
		"spiffe://mesh.test/node/a", "SPIFFE://mesh.test/node/a", "spiffe://mesh.test/node/a#",
		"spiffe://mesh.test/node/%61", "", "#", "?",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		value, err := asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: tagURI, Bytes: []byte(name)}})
		if err != nil {
			t.Fatal(err)
		}
		leaf := &x509.Certificate{
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
			Extensions:  []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}},
		}
		peer, err := pki.PeerFromChain([][]*x509.Certificate{{leaf}}, "mesh.test", x509.ExtKeyUsageClientAuth)
		if err == nil && peer.ID.String() != name {
			t.Errorf("%q is taken for %s", name, peer.ID)
		}
	})
}
