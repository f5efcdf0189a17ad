package pki

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// ErrIdentity is wrapped by every refusal of a chain that verified but does not name one peer of this mesh.
var ErrIdentity = errors.New("certificate does not identify a peer of this mesh")

// ErrUsage is wrapped when a leaf lacks the extended key usage that its side of the connection needs. It wraps ErrIdentity.
var ErrUsage = fmt.Errorf("%w: extended key usage", ErrIdentity)

// Peer is who a verified chain names.
type Peer struct {
	ID          ID
	Serial      string // lower-case hexadecimal, as SerialString spells it
	Fingerprint string // of the leaf
	Issuer      string // fingerprint of the certificate that signed the leaf; empty if the leaf is in the bundle itself
	NotBefore   time.Time
	NotAfter    time.Time
	Leaf        *x509.Certificate
}

// PeerFromChain reads the identity of the leaf of verified chains, as crypto/tls reports them. The leaf must carry exactly one URI SAN, in the
// trust domain, be no certificate authority and able to sign none, and list usage explicitly. A node's leaf carries no other name.
// Nothing but that SAN is looked at: the common name is whatever its holder asked for. Errors wrap ErrIdentity.
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

// PeerFromState is PeerFromChain for the client side of a finished handshake, as a server sees it.
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
	if len(leaf.URIs) != 1 {
		return ID{}, fmt.Errorf("%w: %d URI names instead of one", ErrIdentity, len(leaf.URIs))
	}
	id, err := ParseID(leaf.URIs[0].String())
	if err != nil {
		return ID{}, fmt.Errorf("%w: %w", ErrIdentity, err)
	}
	if id.TrustDomain != trustDomain {
		return ID{}, fmt.Errorf("%w: trust domain %q", ErrIdentity, id.TrustDomain)
	}
	if id.Kind == KindNode && len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 {
		return ID{}, fmt.Errorf("%w: a node's certificate with other names", ErrIdentity)
	}
	// An absent extension would verify for any usage, and so would `any`: neither is what our authorities issue.
	if !slices.Contains(leaf.ExtKeyUsage, usage) {
		return ID{}, ErrUsage
	}
	return id, nil
}

// Fingerprint is the SHA-256 of a certificate in lower-case hexadecimal.
func Fingerprint(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

// FingerprintDER is Fingerprint of an encoded certificate.
func FingerprintDER(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

// PublicKeyFingerprint is the SHA-256 of the encoded public key (SubjectPublicKeyInfo): what issuance is keyed by.
func PublicKeyFingerprint(pub any) (string, error) {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", fmt.Errorf("encode public key: %w", err)
	}
	return FingerprintDER(der), nil
}

// SerialString is the one spelling of a serial number: lower-case hexadecimal without leading zeros.
func SerialString(n *big.Int) string {
	if n == nil {
		return ""
	}
	return n.Text(16)
}

// chainEndsIn reports whether one of the chains ends in one of the roots.
func chainEndsIn(chains [][]*x509.Certificate, roots []*x509.Certificate) bool {
	for _, chain := range chains {
		if len(chain) == 0 {
			continue
		}
		last := chain[len(chain)-1]
		for _, root := range roots {
			if bytes.Equal(root.Raw, last.Raw) {
				return true
			}
		}
	}
	return false
}
