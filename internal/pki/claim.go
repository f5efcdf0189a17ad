package pki

import (
	"bytes"
	"crypto/x509"
	"fmt"
	"strings"
)

// Bounds of what is read of a certificate that was not verified. A peer chooses what is in it.
const (
	claimCertificates = 8       // in which the issuer is looked for
	claimExtension    = 4 << 10 // bytes of the list of names
	claimNames        = 4
	claimSerialBits   = 512
)

// Claim is what a certificate claims that was presented and refused. Nothing in it is verified: the peer may have made
// the certificate itself. Its texts are printable and bounded.
type Claim struct {
	// SAN has the URI names, with commas between them.
	SAN string
	// ID is the identity that SAN spells; zero unless the certificate has exactly one URI name, in the one spelling of an
	// identity.
	ID     ID
	Serial string // as SerialString spells it; empty if it is longer than any authority may issue
	// Issuer is the fingerprint of the certificate among those presented that has the issuer's name; empty: none has.
	Issuer string
	// Validity is the time of the certificate, for people.
	Validity string
}

// ReadClaim reads the claim of certificates as a peer presented them, the leaf first. Its cost is bounded and less than
// that of the verification that refused them.
func ReadClaim(certs []*x509.Certificate) Claim {
	if len(certs) == 0 || certs[0] == nil {
		return Claim{}
	}
	leaf := certs[0]
	out := Claim{SAN: claimedNames(leaf)}
	if leaf.SerialNumber != nil && leaf.SerialNumber.BitLen() <= claimSerialBits {
		out.Serial = SerialString(leaf.SerialNumber)
	}
	out.ID, _ = claimedID(leaf)
	for _, cert := range certs[1:min(len(certs), claimCertificates)] {
		if bytes.Equal(cert.RawSubject, leaf.RawIssuer) {
			out.Issuer = Fingerprint(cert)
			break
		}
	}
	const layout = "2006-01-02T15:04:05Z"
	out.Validity = printable(leaf.NotBefore.UTC().Format(layout) + " to " + leaf.NotAfter.UTC().Format(layout))
	return out
}

// claimedID returns the identity that the only URI name spells, and whether there is one.
func claimedID(leaf *x509.Certificate) (ID, bool) {
	for _, extension := range leaf.Extensions {
		if extension.Id.Equal(oidSubjectAltName) && len(extension.Value) > claimExtension {
			return ID{}, false
		}
	}
	raw, _, err := uriName(leaf)
	if err != nil {
		return ID{}, false
	}
	id, err := ParseID(raw)
	return id, err == nil
}

func claimedNames(leaf *x509.Certificate) string {
	names := make([]string, 0, claimNames)
	for _, uri := range leaf.URIs[:min(len(leaf.URIs), claimNames)] {
		names = append(names, printable(uri.String()))
	}
	if more := len(leaf.URIs) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return clip(strings.Join(names, ","))
}

// printable returns the beginning of a text with each byte that is not printable ASCII replaced.
func printable(s string) string {
	out := []byte(clip(s))
	for i, c := range out {
		if c < ' ' || c > '~' {
			out[i] = '?'
		}
	}
	return string(out)
}
