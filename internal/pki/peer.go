package pki

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// ErrIdentity is wrapped by every refusal of a chain that verified but does not name one peer of this mesh.
var ErrIdentity = errors.New("certificate does not identify a peer of this mesh")

// ErrUsage is wrapped when a leaf lacks the extended key usage that its side of the connection needs, or has one that
// it must not. It wraps ErrIdentity.
var ErrUsage = fmt.Errorf("%w: extended key usage", ErrIdentity)

// Peer is the peer that a verified chain names.
type Peer struct {
	ID          ID
	Serial      string // lower-case hexadecimal, as SerialString spells it
	Fingerprint string // of the leaf
	Issuer      string // fingerprint of the certificate that signed the leaf; empty if the leaf is in the bundle itself
	NotBefore   time.Time
	NotAfter    time.Time
	Leaf        *x509.Certificate
}

// PeerFromChain reads the identity of the leaf of verified chains, as crypto/tls reports them. The leaf must carry
// exactly one URI SAN, in the one spelling of an identity of the trust domain, be no certificate authority and able to
// sign none, and list usage explicitly. A node's leaf carries no other name, and no usage but that of a client; a
// service's may have those of both sides. Nothing but that SAN is read for the identity: the common name is chosen by
// the requester. Errors wrap ErrIdentity.
func PeerFromChain(verified [][]*x509.Certificate, trustDomain string, usage x509.ExtKeyUsage) (Peer, error) {
	if len(verified) == 0 || len(verified[0]) == 0 {
		return Peer{}, fmt.Errorf("%w: no verified chain", ErrIdentity)
	}
	leaf := verified[0][0]
	id, err := leafID(leaf, trustDomain, usage)
	if err != nil {
		return Peer{}, err
	}
	peer := Peer{
		ID: id, Serial: SerialString(leaf.SerialNumber), Fingerprint: Fingerprint(leaf),
		NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter, Leaf: leaf,
	}
	if len(verified[0]) > 1 {
		peer.Issuer = Fingerprint(verified[0][1])
	}
	return peer, nil
}

// PeerFromState does the same as PeerFromChain for the client side of a finished handshake, as a server sees it.
func PeerFromState(state *tls.ConnectionState, trustDomain string) (Peer, error) {
	if state == nil || !state.HandshakeComplete {
		return Peer{}, fmt.Errorf("%w: no finished handshake", ErrIdentity)
	}
	return PeerFromChain(state.VerifiedChains, trustDomain, x509.ExtKeyUsageClientAuth)
}

func leafID(leaf *x509.Certificate, trustDomain string, usage x509.ExtKeyUsage) (ID, error) {
	if leaf.IsCA || leaf.KeyUsage&(x509.KeyUsageCertSign|x509.KeyUsageCRLSign) != 0 {
		return ID{}, fmt.Errorf("%w: an authority's certificate used as a leaf", ErrIdentity)
	}
	raw, others, err := uriName(leaf)
	if err != nil {
		return ID{}, err
	}
	id, err := ParseID(raw)
	if err != nil {
		return ID{}, fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	// ParseID accepts one spelling only; this check holds even if ParseID comes to accept others.
	if id.String() != raw {
		return ID{}, fmt.Errorf("%w: the name %q is not spelled as %s", ErrIdentity, clip(raw), id)
	}
	if id.TrustDomain != trustDomain {
		return ID{}, &TrustDomainError{Got: id.TrustDomain, Want: trustDomain}
	}
	if id.Kind == KindNode && others > 0 {
		return ID{}, fmt.Errorf("%w: a node's certificate with other names", ErrIdentity)
	}
	return id, checkUsage(leaf, id.Kind, usage)
}

// TrustDomainError is the refusal of a certificate of another trust domain. It wraps ErrIdentity.
type TrustDomainError struct{ Got, Want string }

func (e *TrustDomainError) Error() string {
	return fmt.Sprintf("%v: trust domain %q", ErrIdentity, e.Got)
}

// Unwrap returns ErrIdentity.
func (e *TrustDomainError) Unwrap() error { return ErrIdentity }

// oidSubjectAltName is the extension that holds a certificate's names.
var oidSubjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

// tagURI is the context-specific tag of a URI among the names.
const tagURI = 6

// uriName returns the bytes of the one URI among the names of a certificate, and how many names of other kinds there
// are. It reads the extension itself: the parsed form has gone through a parser of URLs, which forgives capitals in the
// scheme and an empty fragment.
func uriName(leaf *x509.Certificate) (string, int, error) {
	var names []asn1.RawValue
	extensions := 0
	for _, extension := range leaf.Extensions {
		if !extension.Id.Equal(oidSubjectAltName) {
			continue
		}
		extensions++
		if rest, err := asn1.Unmarshal(extension.Value, &names); err != nil || len(rest) > 0 {
			return "", 0, fmt.Errorf("%w: its names cannot be read", ErrIdentity)
		}
	}
	if extensions > 1 {
		return "", 0, fmt.Errorf("%w: %d lists of names", ErrIdentity, extensions)
	}
	raw, uris := "", 0
	for _, name := range names {
		if name.Class == asn1.ClassContextSpecific && name.Tag == tagURI && !name.IsCompound {
			raw = string(name.Bytes)
			uris++
		}
	}
	if uris != 1 {
		return "", 0, fmt.Errorf("%w: %d URI names instead of one", ErrIdentity, uris)
	}
	return raw, len(names) - uris, nil
}

// checkUsage returns an error unless the leaf has the usage of this side and no other than our authorities issue. An
// absent extension would verify for any usage, and so would `any`.
func checkUsage(leaf *x509.Certificate, kind Kind, usage x509.ExtKeyUsage) error {
	if !slices.Contains(leaf.ExtKeyUsage, usage) {
		return ErrUsage
	}
	if len(leaf.UnknownExtKeyUsage) > 0 {
		return fmt.Errorf("%w: one that is not known", ErrUsage)
	}
	if kind == KindNode && len(leaf.ExtKeyUsage) != 1 {
		return fmt.Errorf("%w: a node's certificate with more than one", ErrUsage)
	}
	for _, has := range leaf.ExtKeyUsage {
		if has != x509.ExtKeyUsageClientAuth && has != x509.ExtKeyUsageServerAuth {
			return fmt.Errorf("%w: one that is for no side of a connection", ErrUsage)
		}
	}
	return nil
}

// KeySHA256 returns the SHA-256 of a certificate's public key, encoded as SubjectPublicKeyInfo.
func KeySHA256(cert *x509.Certificate) []byte {
	sum := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return sum[:]
}

// Fingerprint returns the SHA-256 of a certificate in lower-case hexadecimal.
func Fingerprint(cert *x509.Certificate) string {
	return FingerprintDER(cert.Raw)
}

// FingerprintDER returns the Fingerprint of an encoded certificate.
func FingerprintDER(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// PublicKeyFingerprint returns the SHA-256 of the encoded public key (SubjectPublicKeyInfo), by which issuance is
// keyed.
func PublicKeyFingerprint(pub any) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", fmt.Errorf("encode public key: %w", err)
	}
	return FingerprintDER(der), nil
}

// SerialString returns the one spelling of a serial number: lower-case hexadecimal without leading zeros.
func SerialString(n *big.Int) string {
	if n == nil {
		return ""
	}
	return n.Text(16)
}

// chainEndsIn reports whether one of the chains ends in one of the roots.
func chainEndsIn(chains [][]*x509.Certificate, roots []*x509.Certificate) bool {
	return slices.ContainsFunc(chains, func(chain []*x509.Certificate) bool {
		return len(chain) > 0 && slices.ContainsFunc(roots, chain[len(chain)-1].Equal)
	})
}
