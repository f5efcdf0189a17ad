// Package canary proves with a certificate of its own whether an ingress trusts what the authority signs: it has the
// authority sign a canary certificate, which is as a node's but of no node, and makes a handshake with it.
package canary

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// certificateLife is the life of a canary certificate. One is used for half of it.
const certificateLife = 10 * time.Minute

// Certificate is a canary certificate. The zero value is none.
type Certificate struct {
	Store  *pki.Store
	issuer string // fingerprint of the certificate that signed it
	until  time.Time
}

// Usable reports whether the certificate may be shown once more, for an issuer that the authority reports.
func (c Certificate) Usable(issuer string, now time.Time) bool {
	return c.Store != nil && c.issuer == issuer && now.Before(c.until)
}

// New has the authority sign a canary certificate.
func New(ctx context.Context, sign func(context.Context, ca.SignRequest) (ca.Issued, error), trustDomain string,
	now time.Time,
) (Certificate, error) {
	key, err := pki.NewKey()
	if err != nil {
		return Certificate{}, err
	}
	csr, err := pki.NewCSR(key, pki.CanaryID(trustDomain))
	if err != nil {
		return Certificate{}, err
	}
	issued, err := sign(ctx, ca.SignRequest{CSR: csr, NodeID: pki.CanaryName, TTL: certificateLife, Now: now})
	if err != nil {
		return Certificate{}, fmt.Errorf("sign canary certificate: %w", err)
	}
	store, err := pki.NewStore(key, issued.Chain)
	if err != nil {
		return Certificate{}, fmt.Errorf("keep canary certificate: %w", err)
	}
	out := Certificate{Store: store, until: time.Now().Add(certificateLife / 2)}
	if len(issued.Chain) > 1 {
		out.issuer = pki.FingerprintDER(issued.Chain[1])
	}
	return out, nil
}
