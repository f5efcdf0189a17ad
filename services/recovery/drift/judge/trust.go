package judge

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

	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/services/recovery/drift/collect"
)

const (
	// rootsEvery is how often the roots of the authority are read, and rootsTimeout bounds one attempt.
	rootsEvery   = 15 * time.Second
	rootsTimeout = 5 * time.Second
	// issuersMost bounds the issuers that are remembered until the roots change: there are a few at a time.
	issuersMost = 64
)

// preflightOK is the state of a preflight that has seen the ingress trust what the authority signs.
var preflightOK = names.Of(recoveryv1.PreflightState_PREFLIGHT_STATE_OK)

// issuerTrust knows to which of the authority's certificates the issuers of nodes' certificates chain. Whether the
// ingress trusts one of them is what the preflight and the replicas of nodeapi tell; recovery's roots only complete the
// chain.
type issuerTrust struct {
	mu      sync.Mutex
	roots   []*x509.Certificate // nil: never read
	issuers map[string][]string // by fingerprint, those of its chain, itself among them; empty: it chains to no root
}

// refresh reads the roots. An authority that does not answer leaves them as they were.
func (t *issuerTrust) refresh(ctx context.Context, deps Deps) {
	ctx, cancel := context.WithTimeout(ctx, rootsTimeout)
	defer cancel()
	roots, err := deps.Roots(ctx)
	if err != nil {
		deps.Logger.WarnContext(ctx, "the authority's roots were not read", slog.String("loop", "drift"), obs.Err(err))
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.roots != nil && slices.EqualFunc(roots, t.roots, (*x509.Certificate).Equal) {
		return
	}
	t.roots, t.issuers = slices.Clone(roots), map[string][]string{}
	if t.roots == nil {
		t.roots = []*x509.Certificate{}
	}
	for _, root := range roots {
		t.issuers[pki.Fingerprint(root)] = []string{pki.Fingerprint(root)}
	}
}

// Authority keeps the roots of the authority as they are, until ctx ends. It is a task of its own: neither a round nor
// a reader waits for the authority.
func (j *Judge) Authority(ctx context.Context) error {
	if j.deps.Roots == nil {
		<-ctx.Done()
		return nil
	}
	for {
		j.trust.refresh(ctx, j.deps)
		timer := time.NewTimer(rootsEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
		}
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
func (t *issuerTrust) learn(ctx context.Context, tx pgx.Tx, nodes map[string]*collect.Node, now time.Time) error {
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
			t.issuers[row.Issuer] = chainOf(row, t.roots, now)
		}
	}
	return nil
}

// unknown returns the serial of one certificate of each issuer that is not known.
func (t *issuerTrust) unknown(nodes map[string]*collect.Node) []string {
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

// chainOf returns the fingerprints of an issuer, whose certificate is in the chain, and of what it chains to up to one
// of the roots; none if it does not.
func chainOf(row chainRow, roots []*x509.Certificate, now time.Time) []string {
	certs, err := pki.DecodeCertificates(row.Chain)
	if err != nil {
		return nil
	}
	trusted, between := x509.NewCertPool(), x509.NewCertPool()
	for _, root := range roots {
		trusted.AddCert(root)
	}
	for _, cert := range certs {
		between.AddCert(cert)
	}
	var out []string
	for _, cert := range certs {
		if pki.Fingerprint(cert) != row.Issuer {
			continue
		}
		chains, err := cert.Verify(x509.VerifyOptions{
			Roots: trusted, Intermediates: between, CurrentTime: now,
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny},
		})
		if err != nil {
			return nil
		}
		for _, chain := range chains {
			for _, link := range chain {
				out = append(out, pki.Fingerprint(link))
			}
		}
		return out
	}
	return nil
}

// of reports whether the ingress trusts an issuer, as a round has seen it, and how that is known, or why not.
func (t *issuerTrust) of(issuer string, s *seen) (bool, string) {
	switch {
	case s.Untrusted != "":
		return false, "the ingress does not trust what the authority signs: " + s.Untrusted
	case s.Preflight != preflightOK:
		return false, "whether the ingress trusts its issuer is not known: the preflight of the authority has not proven it"
	case issuer == "":
		return false, "the issuer of its certificate is not on record"
	case issuer == s.TrustedIssuer:
		return true, "the preflight saw the ingress trust its issuer " + issuer
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	chain, known := t.issuers[issuer]
	for _, link := range append([]string{issuer}, chain...) {
		if slices.Contains(s.Published, link) {
			return true, "each replica of nodeapi publishes that it trusts " + link + ", to which its issuer " + issuer +
				" chains"
		}
	}
	switch {
	case t.roots == nil:
		return false, "no replica of nodeapi publishes its issuer " + issuer + ", and the authority has not told its roots"
	case !known:
		return false, "no certificate of its issuer " + issuer + " is on record"
	}
	return false, "its issuer " + issuer + " chains to nothing that each replica of nodeapi publishes that it trusts"
}
