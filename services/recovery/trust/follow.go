package trust

import (
	"context"
	"crypto/x509"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// Following is an authority whose issuer is the one that the database names. It reads the name before each certificate:
// of several replicas none signs with a former issuer once the next one signs, but for requests under way.
type Following struct {
	ca.Rotating

	pool *pgxpool.Pool
}

// Follow returns the authority. The given one must sign with nothing before Use is called.
func Follow(pool *pgxpool.Pool, authority ca.Rotating) *Following {
	return &Following{Rotating: authority, pool: pool}
}

func (f *Following) follow(ctx context.Context) error {
	issuer, err := pg.Value[string](ctx, f.pool, readSigns)
	if err != nil {
		return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "which issuer signs cannot be read",
			fault.Cause(fmt.Errorf("read which issuer signs: %w", err)))
	}
	return f.Use(issuer)
}

// Sign issues a node's certificate.
func (f *Following) Sign(ctx context.Context, req ca.SignRequest) (ca.Issued, error) {
	if err := f.follow(ctx); err != nil {
		return ca.Issued{}, err
	}
	return f.Rotating.Sign(ctx, req)
}

// Roots returns the roots of the authority, first that of the issuer which signs.
func (f *Following) Roots(ctx context.Context) ([]*x509.Certificate, error) {
	if err := f.follow(ctx); err != nil {
		return nil, err
	}
	return f.Rotating.Roots(ctx)
}

// Intermediates returns the certificate that signs.
func (f *Following) Intermediates(ctx context.Context) ([]*x509.Certificate, error) {
	if err := f.follow(ctx); err != nil {
		return nil, err
	}
	return f.Rotating.Intermediates(ctx)
}

// SigningFingerprint returns the fingerprint of the certificate that signs.
func (f *Following) SigningFingerprint(ctx context.Context) (string, error) {
	if err := f.follow(ctx); err != nil {
		return "", err
	}
	return f.Rotating.SigningFingerprint(ctx)
}
