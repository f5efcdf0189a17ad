package signing

import (
	"context"
	"crypto/x509"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

var (
	readIssuer = pg.Define(pg.RoleRecovery, "signing.read", `SELECT s.issuer FROM recovery.authority_signs s`)
	saveIssuer = pg.Define(pg.RoleRecovery, "signing.save", `UPDATE recovery.authority_signs SET issuer = $1`)
)

// Read returns the fingerprint of the issuer that the database names; "" is the one that the authority was made with.
func Read(ctx context.Context, q pg.Querier) (string, error) {
	issuer, err := pg.Value[string](ctx, q, readIssuer)
	if err != nil {
		return "", fmt.Errorf("read which issuer signs: %w", err)
	}
	return issuer, nil
}

// Save names the issuer of a fingerprint in the database; the caller holds the lock on the open rotation.
func Save(ctx context.Context, tx pgx.Tx, fingerprint string) error {
	if _, err := pg.Exec(ctx, tx, saveIssuer, fingerprint); err != nil {
		return fmt.Errorf("write which issuer signs: %w", err)
	}
	return nil
}

// Following is an authority whose issuer is the one that the database names. It reads the name before each certificate:
// of several replicas none signs with a former issuer once the next one signs, but for requests under way. What it
// reports of itself follows the name as events come, with which each change of the name does.
type Following struct {
	ca.Rotating

	pool     *pgxpool.Pool
	numbered *events.Signal

	mu   sync.Mutex
	read events.Reading // of the name; zero: Use has refused it
}

// Follow returns the authority. The given one must sign with nothing before Use is called. Without a signal, which is
// notified when events were numbered, it always reads the name.
func Follow(pool *pgxpool.Pool, numbered *events.Signal, authority ca.Rotating) *Following {
	return &Following{Rotating: authority, pool: pool, numbered: numbered}
}

// reports reads the name if it may have changed.
func (f *Following) reports(ctx context.Context) error {
	f.mu.Lock()
	read := f.read
	f.mu.Unlock()
	if !read.Due(0) {
		return nil
	}
	return f.follow(ctx)
}

func (f *Following) follow(ctx context.Context) error {
	reading := f.numbered.Reading()
	issuer, err := Read(ctx, f.pool)
	if err != nil {
		return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "which issuer signs cannot be read",
			fault.Cause(err))
	}
	f.mu.Lock() // a name that was read earlier and is used later is due with its event
	defer f.mu.Unlock()
	if err = f.Use(issuer); err != nil {
		reading = events.Reading{}
	}
	f.read = reading
	return err
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
	if err := f.reports(ctx); err != nil {
		return nil, err
	}
	return f.Rotating.Roots(ctx)
}

// Intermediates returns the certificate that signs.
func (f *Following) Intermediates(ctx context.Context) ([]*x509.Certificate, error) {
	if err := f.reports(ctx); err != nil {
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
