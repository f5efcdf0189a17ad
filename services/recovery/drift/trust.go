package drift

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// rootsFor is how long the roots of the authority are taken as they were read.
	rootsFor = 15 * time.Second
	// issuersMost bounds the issuers that are remembered until the roots change: there are a few at a time.
	issuersMost = 64
)

// issuerTrust knows which issuers of certificates of nodes the ingress trusts. What a replica of nodeapi has loaded is not
// reported: the issuers are compared with the roots that recovery's authority gives to the ingress.
type issuerTrust struct {
	mu      sync.Mutex
	roots   []*x509.Certificate // nil: never read
	readAt  time.Time
	issuers map[string]bool // by fingerprint, whether it chains to the roots; an unknown one is in none
}

// refresh reads the roots, if those that were read are old. An authority that does not answer leaves them as they were.
func (t *issuerTrust) refresh(ctx context.Context, deps Deps) {
	t.mu.Lock()
	fresh := deps.Roots == nil || time.Since(t.readAt) < rootsFor
	if !fresh {
		t.readAt = time.Now()
	}
	t.mu.Unlock()
	if fresh {
		return
	}
	roots, err := deps.Roots(ctx)
	if err != nil {
		deps.Logger.WarnContext(ctx, "the authority's roots were not read", slog.String("loop", "drift"), obs.Err(err))
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.EqualFunc(roots, t.roots, (*x509.Certificate).Equal) {
		return
	}
	t.roots, t.issuers = roots, map[string]bool{}
	for _, root := range roots {
		t.issuers[pki.Fingerprint(root)] = true
	}
}

// issuedBy reads the chain of one certificate of each issuer.
var issuedBy = pg.Define(pg.RoleRecovery, "drift.issued_by", `
	SELECT s.issuer_fingerprint AS issuer, s.chain_pem AS chain FROM recovery.serial s WHERE s.serial = ANY ($1)`)

type chainRow struct {
	Issuer string `db:"issuer"`
	Chain  []byte `db:"chain"`
}

// learn checks the issuers of nodes that are not known yet, each by one certificate of it.
func (t *issuerTrust) learn(ctx context.Context, tx pgx.Tx, nodes map[string]*node, now time.Time) error {
	serials := t.unknown(nodes)
	if len(serials) == 0 {
		return nil
	}
	chains, err := pg.All[chainRow](ctx, tx, issuedBy, serials)
	if err != nil {
		return fmt.Errorf("read chains: %w", err)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, row := range chains {
		if len(t.issuers) < issuersMost {
			t.issuers[row.Issuer] = chainsTo(row, t.roots, now)
		}
	}
	return nil
}

// unknown returns the serial of one certificate of each issuer that is not known.
func (t *issuerTrust) unknown(nodes map[string]*node) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.roots == nil {
		return nil
	}
	found := map[string]string{}
	for _, n := range nodes {
		if _, known := t.issuers[n.Issuer]; !known && n.Issuer != "" && n.Serial != "" {
			found[n.Issuer] = n.Serial
		}
	}
	return slices.Collect(maps.Values(found))
}

// chainsTo reports whether an issuer, whose certificate is in the chain, is trusted by who trusts the roots.
func chainsTo(row chainRow, roots []*x509.Certificate, now time.Time) bool {
	certs, err := pki.DecodeCertificates(row.Chain)
	if err != nil {
		return false
	}
	trusted, between := x509.NewCertPool(), x509.NewCertPool()
	for _, root := range roots {
		trusted.AddCert(root)
	}
	for _, cert := range certs {
		between.AddCert(cert)
	}
	for _, cert := range certs {
		if pki.Fingerprint(cert) != row.Issuer {
			continue
		}
		_, err := cert.Verify(x509.VerifyOptions{
			Roots: trusted, Intermediates: between, CurrentTime: now,
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		})
		return err == nil
	}
	return false
}

// of reports whether an issuer is trusted, and how that is known.
func (t *issuerTrust) of(issuer string) (bool, string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	trusted, known := t.issuers[issuer]
	switch {
	case t.roots == nil:
		return false, "the roots that the ingress is given are not known: the authority has not answered"
	case !known:
		return false, "no certificate of its issuer " + issuer + " is on record"
	case !trusted:
		return false, "its issuer " + issuer + " does not chain to the roots that recovery gives the ingress"
	}
	return true, "its issuer " + issuer + " chains to the roots that recovery gives the ingress"
}
