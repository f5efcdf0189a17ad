package ca

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/smallstep/certificates/api"
	"github.com/smallstep/certificates/ca"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/wallclock"
)

// RemoteConfig describes a step-ca process.
type RemoteConfig struct {
	URL             string // https://host:port
	RootsPath       string // PEM roots that verify the process itself
	ProvisionerPath string // PEM key of its JWK provisioner
	Provisioner     string // its name; default DefaultProvisioner
	TrustDomain     string
	MinTTL, MaxTTL  time.Duration // as in the provisioner's claims; defaults as in Config
	Timeout         time.Duration // of one call; default 5 s
}

// Remote is a step-ca process. Its provisioner must have the template and the claims of the embedded authority: every
// certificate that it signs is checked against them.
type Remote struct {
	cfg            RemoteConfig
	client         *ca.Client
	http           *http.Client
	mint           *minter
	provisionerKey *ecdsa.PrivateKey
}

// Dial prepares a client of a step-ca process; nothing is sent yet.
func Dial(cfg RemoteConfig) (*Remote, error) {
	cfg.Provisioner, cfg.Timeout = cmp.Or(cfg.Provisioner, DefaultProvisioner), cmp.Or(cfg.Timeout, 5*time.Second)
	limits := config.Or(Config{MinTTL: cfg.MinTTL, MaxTTL: cfg.MaxTTL, Dir: ".", TrustDomain: cfg.TrustDomain}, defaults)
	if err := limits.validate(); err != nil {
		return nil, fmt.Errorf("use authority %s: %w", cfg.URL, err)
	}
	cfg.MinTTL, cfg.MaxTTL = limits.MinTTL, limits.MaxTTL
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	key, err := loadProvisioner(cfg.ProvisionerPath)
	if err != nil {
		return nil, err
	}
	mint, err := newMinter(key, cfg.Provisioner, cfg.URL+"/1.0/sign")
	if err != nil {
		return nil, err
	}
	client, err := ca.NewClient(cfg.URL, ca.WithRootFile(cfg.RootsPath), ca.WithTimeout(cfg.Timeout))
	if err != nil {
		return nil, fmt.Errorf("use authority %s: %w", cfg.URL, err)
	}
	bundle, err := pki.LoadBundle(cfg.RootsPath)
	if err != nil {
		return nil, err
	}
	return &Remote{
		cfg: cfg, client: client, mint: mint, provisionerKey: key,
		http: &http.Client{Transport: rootsTransport(bundle), Timeout: cfg.Timeout},
	}, nil
}

// Sign issues a node's certificate; see Signer.
func (r *Remote) Sign(ctx context.Context, req SignRequest) (Issued, error) {
	id := pki.NodeID(r.cfg.TrustDomain, req.NodeID)
	csr, err := prepare(req, id, r.cfg.MinTTL, r.cfg.MaxTTL)
	if err != nil {
		return Issued{}, err
	}
	token, err := r.mint.mint(csr, id, req, wallclock.Now())
	if err != nil {
		return Issued{}, err
	}
	begins, ends := req.validity()
	answer, err := r.client.SignWithContext(ctx, &api.SignRequest{
		CsrPEM: api.NewCertificateRequest(csr), OTT: token, NotBefore: api.NewTimeDuration(begins),
		NotAfter: api.NewTimeDuration(ends),
	})
	if err != nil {
		return Issued{}, unavailable(err)
	}
	chain := certificates(answer.CertChainPEM)
	if len(chain) == 0 && answer.ServerPEM.Certificate != nil {
		chain = []*x509.Certificate{answer.ServerPEM.Certificate, answer.CaPEM.Certificate}
	}
	return checkIssued(chain, csr, id, ends)
}

// Roots returns the roots of the node authority, as it reports them.
func (r *Remote) Roots(ctx context.Context) ([]*x509.Certificate, error) {
	answer, err := r.client.RootsWithContext(ctx)
	if err != nil {
		return nil, unavailable(err)
	}
	return certificates(answer.Certificates), nil
}

// Intermediates returns the intermediates of the node authority, as it reports them.
func (r *Remote) Intermediates(ctx context.Context) (_ []*x509.Certificate, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.cfg.URL+"/intermediates", http.NoBody)
	if err != nil {
		return nil, fmt.Errorf("ask for intermediates: %w", err)
	}
	resp, err := r.http.Do(req)
	if err != nil {
		return nil, unavailable(err)
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, unavailable(err)
	}
	if resp.StatusCode/100 != 2 {
		return nil, unavailable(fmt.Errorf("authority answered %s", resp.Status))
	}
	var answer api.IntermediatesResponse
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, unavailable(fmt.Errorf("read intermediates: %w", err))
	}
	return certificates(answer.Certificates), nil
}

// SigningFingerprint returns the fingerprint of the first intermediate that the authority reports: the one it signs
// with.
func (r *Remote) SigningFingerprint(ctx context.Context) (string, error) {
	certs, err := r.Intermediates(ctx)
	if err != nil {
		return "", err
	}
	if len(certs) == 0 {
		return "", unavailable(errors.New("authority reports no intermediate"))
	}
	return pki.Fingerprint(certs[0]), nil
}

// ProvisionerKey returns the key that signs the authority's tokens; see Embedded.ProvisionerKey.
func (r *Remote) ProvisionerKey() crypto.Signer { return r.provisionerKey }

// Close drops idle connections.
func (r *Remote) Close() error {
	r.client.CloseIdleConnections()
	r.http.CloseIdleConnections()
	return nil
}
