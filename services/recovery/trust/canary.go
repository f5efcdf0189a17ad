package trust

import (
	"context"
	"fmt"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// canaryLife is the life of a canary certificate. One is used for half of it.
const canaryLife = 10 * time.Minute

// canary is a canary certificate. The zero value is none.
type canary struct {
	store  *pki.Store
	issuer string // fingerprint of the certificate that signed it
	until  time.Time
}

// usable reports whether the certificate may be shown once more, for an issuer that the authority reports.
func (c canary) usable(issuer string, now time.Time) bool {
	return c.store != nil && c.issuer == issuer && now.Before(c.until)
}

// newCanary has the authority sign a canary certificate.
func newCanary(ctx context.Context, sign func(context.Context, ca.SignRequest) (ca.Issued, error), trustDomain string,
	now time.Time,
) (canary, error) {
	key, err := pki.NewKey()
	if err != nil {
		return canary{}, err
	}
	csr, err := pki.NewCSR(key, pki.CanaryID(trustDomain))
	if err != nil {
		return canary{}, err
	}
	issued, err := sign(ctx, ca.SignRequest{CSR: csr, NodeID: pki.CanaryName, TTL: canaryLife, Now: now})
	if err != nil {
		return canary{}, fmt.Errorf("sign canary certificate: %w", err)
	}
	store, err := pki.NewStore(key, issued.Chain)
	if err != nil {
		return canary{}, fmt.Errorf("keep canary certificate: %w", err)
	}
	out := canary{store: store, until: time.Now().Add(canaryLife / 2)}
	if len(issued.Chain) > 1 {
		out.issuer = pki.FingerprintDER(issued.Chain[1])
	}
	return out, nil
}
