package ca

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// SignRequest is a request for one certificate of a node.
type SignRequest struct {
	CSR            []byte // DER
	NodeID         string
	NodeInstanceID string
	Profile        string
	TTL            time.Duration // of the certificate; refused outside the bounds that the authority was configured with
	// Now is the time by which the certificate will be judged: the database's. Zero is this host's clock.
	Now time.Time
}

// validity returns when the certificate begins, which is dated back, and when it ends.
func (r SignRequest) validity() (time.Time, time.Time) {
	now := r.Now
	if now.IsZero() {
		now = wallclock.Now()
	}
	return now.Add(-pki.Backdate), now.Add(r.TTL)
}

// Issued is a signed certificate.
type Issued struct {
	Chain     [][]byte // DER, leaf first, without the root
	Serial    string   // as pki.SerialString spells it
	NotBefore time.Time
	NotAfter  time.Time
}

// Signer is the node authority.
type Signer interface {
	// Sign issues a certificate for a request that has been authorised. A bad request is fault csr_refused; an authority
	// that cannot be reached or is broken is fault certificate_authority_unavailable. Each call mints a token of its own,
	// so it may be repeated.
	Sign(ctx context.Context, req SignRequest) (Issued, error)
	// Roots returns the roots that ingress must trust.
	Roots(ctx context.Context) ([]*x509.Certificate, error)
	// Intermediates returns the certificates that sign leaves now.
	Intermediates(ctx context.Context) ([]*x509.Certificate, error)
	// SigningFingerprint returns the fingerprint of the certificate that signs leaves now; the trust of ingress is
	// compared with it.
	SigningFingerprint(ctx context.Context) (string, error)
	// ProvisionerKey returns the key that signs the authority's one-time tokens, and recovery tokens.
	ProvisionerKey() crypto.Signer
	// Close releases the resources of the authority.
	Close() error
}

const (
	minRSABits = 2048
	maxRSABits = 4096
	maxCSRSize = 16 << 10
)

// CheckCSR applies the policy of certificate requests: the key kinds below, a good proof of possession, no name but the
// node's own, no request for extensions. Every refusal is fault csr_refused. Sign calls it; recovery calls it before it
// claims anything.
func CheckCSR(der []byte, id pki.ID) (*x509.CertificateRequest, error) {
	if len(der) == 0 || len(der) > maxCSRSize {
		return nil, refuse("the certificate request is empty or too large", nil)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, refuse("the certificate request cannot be read", err)
	}
	// The size of the key first: verifying with an enormous one is itself an attack.
	if why := keyDefect(csr.PublicKey); why != "" {
		return nil, refuse(why, nil)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, refuse("the certificate request does not prove possession of its key", err)
	}
	if len(csr.DNSNames)+len(csr.IPAddresses)+len(csr.EmailAddresses) > 0 || len(csr.URIs) > 1 {
		return nil, refuse("the certificate request asks for other names than the node's identity", nil)
	}
	if len(csr.URIs) == 1 && csr.URIs[0].String() != id.String() {
		return nil, refuse("the certificate request asks for another identity", nil)
	}
	if cn := csr.Subject.CommonName; cn != "" && cn != id.Name && cn != id.String() {
		return nil, refuse("the certificate request asks for another common name", nil)
	}
	for _, ext := range csr.Extensions {
		if !ext.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) { // subject alternative name, checked above
			return nil, refuse("the certificate request asks for extensions", nil)
		}
	}
	return csr, nil
}

func keyDefect(pub any) string {
	switch key := pub.(type) {
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() && key.Curve != elliptic.P384() {
			return "the key's curve is neither P-256 nor P-384"
		}
	case ed25519.PublicKey:
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSABits || bits > maxRSABits {
			return fmt.Sprintf("an RSA key must have %d to %d bits", minRSABits, maxRSABits)
		}
	default:
		return "the kind of key is not supported"
	}
	return ""
}

func refuse(why string, cause error) error {
	if cause == nil {
		return fault.New(commonv1.Reason_REASON_CSR_REFUSED, why)
	}
	return fault.New(commonv1.Reason_REASON_CSR_REFUSED, why, fault.Cause(cause))
}
