package ca

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/smallstep/certificates/api"
	"github.com/smallstep/certificates/authority"
	authorityconfig "github.com/smallstep/certificates/authority/config"
	"github.com/smallstep/certificates/authority/provisioner"
	"github.com/smallstep/certificates/db"
	"go.step.sm/crypto/jose"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// template determines the contents of a node's certificate: only the key comes from the request. Without the utf8:
// prefix the authority would refuse the separators of the private extension.
const template = `{"subject":{"commonName":{{toJson .Subject.CommonName}}},
"sans":{{toJson .SANs}},"keyUsage":["digitalSignature"],"extKeyUsage":["clientAuth"],
"extensions":[{"id":"1.3.6.1.4.1.59999.1.1","value":
{{asn1Enc (printf "utf8:%s|%s|%s" .Token.node_id .Token.node_instance_id .Token.env_profile) | toJson}}}]}`

// Config describes the embedded authority.
type Config struct {
	Dir         string // of the keys; shared by replicas
	TrustDomain string
	MinTTL      time.Duration // default 5 s, so that drills can let a certificate expire
	MaxTTL      time.Duration // default 24 h
	// DatabaseURL is the Postgres database of the authority's own (it is created if missing). It keeps used tokens and
	// issued certificates across restarts; the authority never deletes from it: recovery deletes their rows when they have
	// expired. Empty: only this process remembers used tokens, and nothing is revoked passively. That loses little, since
	// a token lives two minutes, is bound to one request, and is not accepted by an authority that started after it was
	// made; but a production mesh needs the record of the signed certificates.
	DatabaseURL string
	// Follows leaves it to Use which issuer signs: nothing is signed before it was called. Otherwise the issuer that the
	// authority was made with signs.
	Follows bool
}

var defaults = Config{MinTTL: 5 * time.Second, MaxTTL: 24 * time.Hour}

func (c Config) validate() error {
	var problems []error
	if c.Dir == "" {
		problems = append(problems, errors.New("no directory"))
	}
	if err := pki.NodeID(c.TrustDomain, "x").Validate(); err != nil {
		problems = append(problems, err)
	}
	if c.MinTTL <= 0 || c.MaxTTL < c.MinTTL {
		problems = append(problems, fmt.Errorf("lifetimes %s to %s", c.MinTTL, c.MaxTTL))
	}
	return errors.Join(problems...)
}

// Embedded is smallstep's authority in this process.
type Embedded struct {
	cfg                Config
	authority          *authority.Authority
	mint               *minter
	root, intermediate *authorityPair
	provisionerKey     *ecdsa.PrivateKey

	config *authorityconfig.Config // of each issuer's authority
	inUse  atomic.Pointer[use]     // nil: not decided yet

	mu      sync.Mutex
	issuers map[string]*signing // by fingerprint; the empty one is that of intermediate.pem
}

// Embedded and Remote are the two forms of the node authority.
var (
	_ Rotating = (*Embedded)(nil)
	_ Signer   = (*Remote)(nil)
)

// Open opens the authority of a directory, and creates its keys if none of its files is there.
func Open(cfg Config) (*Embedded, error) {
	cfg = config.Or(cfg, defaults)
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("open authority: %w", err)
	}
	e := &Embedded{cfg: cfg}
	if err := pki.WithLock(filepath.Join(cfg.Dir, lockFile), e.load); err != nil {
		return nil, fmt.Errorf("open authority: %w", err)
	}
	host := "ca." + cfg.TrustDomain
	var err error
	if e.mint, err = newMinter(e.provisionerKey, DefaultProvisioner, "https://"+host+"/1.0/sign"); err != nil {
		return nil, err
	}
	jwk, err := publicJWK(e.provisionerKey)
	if err != nil {
		return nil, err
	}
	e.config = authorityConfig(cfg, []string{host}, jwk)
	if e.authority, err = e.start(e.root, e.intermediate, nil); err != nil {
		return nil, err
	}
	root, err := e.rootOf(e.intermediate.cert)
	if err != nil {
		return nil, errors.Join(err, e.Close())
	}
	made := &signing{authority: e.authority, root: root, issuer: e.intermediate}
	e.issuers = map[string]*signing{"": made, pki.Fingerprint(e.intermediate.cert): made}
	if !cfg.Follows {
		e.inUse.Store(&use{signing: made})
	}
	return e, nil
}

func (e *Embedded) load() error {
	var err error
	name := e.cfg.TrustDomain + " node"
	if err := rootStands(e.cfg.Dir); err != nil {
		return err
	}
	if e.root, err = loadOrCreatePair(filepath.Join(e.cfg.Dir, rootFile), name+" root", rootLife, nil); err != nil {
		return err
	}
	if e.intermediate, err = loadOrCreatePair(filepath.Join(e.cfg.Dir, intermediateFile), name+" intermediate",
		intermediateLife, e.root); err != nil {
		return err
	}
	// A lost one is made anew: the authority's tokens are used at once, at the authority of the same process. Recovery
	// tokens of the lost key are not accepted any more.
	if e.provisionerKey, err = loadOrCreateProvisioner(filepath.Join(e.cfg.Dir, provisionerFile)); err != nil {
		return err
	}
	return writeRoots(e.cfg.Dir, e.root.cert)
}

// rootStands refuses a directory that has other files of an authority and not its root, which is always made first:
// peers trust that root, and would trust no certificate of another one.
func rootStands(dir string) error {
	root := filepath.Join(dir, rootFile)
	if found, err := pki.Exists(root); err != nil || found {
		return err
	}
	for _, name := range []string{intermediateFile, provisionerFile, RootsFile} {
		found, err := pki.Exists(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if found {
			return fmt.Errorf("%s: %w, and %s of its authority stands: no other root is made, since no peer would trust it; "+
				"restore the file from a backup of the directory; without a backup, move the whole directory away, "+
				"which makes a new authority, and enrol every node anew", root, errNoKey, name)
		}
	}
	return nil
}

// authorityConfig returns the configuration of smallstep's authority with one provisioner, whose public key is given.
func authorityConfig(cfg Config, names []string, key *jose.JSONWebKey) *authorityconfig.Config {
	out := &authorityconfig.Config{
		DNSNames: names,
		AuthorityConfig: &authorityconfig.AuthConfig{
			Provisioners: provisioner.List{&provisioner.JWK{
				Type: "JWK", Name: DefaultProvisioner, Key: key, Claims: provisionerClaims(cfg),
				Options: &provisioner.Options{X509: &provisioner.X509Options{Template: template}},
			}},
			Backdate: &provisioner.Duration{Duration: pki.Backdate},
			// Tokens are made for one attempt, so none can be older than the authority: the check costs nothing and stops a
			// replay after a restart that forgot the used ones.
			DisableIssuedAtCheck: false,
		},
	}
	if cfg.DatabaseURL != "" {
		out.DB = &db.Config{Type: "postgresql", DataSource: cfg.DatabaseURL}
	}
	return out
}

// provisionerClaims returns claims that forbid what would bypass recovery: renewal at the authority, and above all
// renewal of an expired certificate.
func provisionerClaims(cfg Config) *provisioner.Claims {
	yes, no := true, false
	return &provisioner.Claims{
		MinTLSDur: &provisioner.Duration{Duration: cfg.MinTTL}, MaxTLSDur: &provisioner.Duration{Duration: cfg.MaxTTL},
		DefaultTLSDur:  &provisioner.Duration{Duration: cfg.MinTTL},
		DisableRenewal: &yes, AllowRenewalAfterExpiry: &no, DisableSmallstepExtensions: &yes, EnableSSHCA: &no,
	}
}

// Sign issues a node's certificate; see Signer.
func (e *Embedded) Sign(ctx context.Context, req SignRequest) (Issued, error) {
	with, err := e.signs()
	if err != nil {
		return Issued{}, err
	}
	issued, err := e.signBy(ctx, with, req)
	if err != nil {
		return Issued{}, err
	}
	for _, cross := range with.crosses {
		issued.Chain = append(issued.Chain, cross.Raw)
	}
	return issued, nil
}

// signBy issues a certificate of one issuer.
func (e *Embedded) signBy(ctx context.Context, with *signing, req SignRequest) (Issued, error) {
	id := pki.NodeID(e.cfg.TrustDomain, req.NodeID)
	csr, err := prepare(req, id, e.cfg.MinTTL, e.cfg.MaxTTL)
	if err != nil {
		return Issued{}, err
	}
	token, err := e.mint.mint(csr, id, req, time.Now())
	if err != nil {
		return Issued{}, err
	}
	signCtx := provisioner.NewContextWithMethod(authority.NewContext(ctx, with.authority), provisioner.SignMethod)
	opts, err := with.authority.Authorize(signCtx, token)
	if err != nil {
		return Issued{}, unavailable(err)
	}
	begins, ends := req.validity()
	chain, err := with.authority.SignWithContext(signCtx, csr,
		provisioner.SignOptions{NotBefore: provisioner.NewTimeDuration(begins), NotAfter: provisioner.NewTimeDuration(ends)},
		opts...)
	if err != nil {
		return Issued{}, unavailable(err)
	}
	return checkIssued(chain, csr, id, ends)
}

// Roots returns the roots of the node authority: that of the issuer that signs, then those of other issuers.
func (e *Embedded) Roots(context.Context) ([]*x509.Certificate, error) {
	with, err := e.shows()
	if err != nil {
		return nil, err
	}
	all, err := e.roots()
	if err != nil {
		return nil, err
	}
	return first(with.root.cert, all), nil
}

// Intermediates returns the certificate that signs.
func (e *Embedded) Intermediates(context.Context) ([]*x509.Certificate, error) {
	with, err := e.shows()
	if err != nil {
		return nil, err
	}
	return []*x509.Certificate{with.issuer.cert}, nil
}

// SigningFingerprint returns the fingerprint of the certificate that signs.
func (e *Embedded) SigningFingerprint(context.Context) (string, error) {
	with, err := e.shows()
	if err != nil {
		return "", err
	}
	return pki.Fingerprint(with.issuer.cert), nil
}

// ProvisionerKey returns the key that signs the authority's one-time tokens and recovery tokens. Bootstrap tokens and
// launch secrets are compared with their hashes in the database.
func (e *Embedded) ProvisionerKey() crypto.Signer { return e.provisionerKey }

// Close shuts the authority and its database connection.
func (e *Embedded) Close() error {
	if err := e.authority.Shutdown(); err != nil {
		return fmt.Errorf("shut authority: %w", err)
	}
	return nil
}

// prepare checks a request before a token is minted for it.
func prepare(req SignRequest, id pki.ID, least, most time.Duration) (*x509.CertificateRequest, error) {
	if err := id.Validate(); err != nil {
		return nil, refuse("the node id cannot be an identity", err)
	}
	if !extensionSafe(req.NodeInstanceID) || !extensionSafe(req.Profile) {
		return nil, refuse("the instance id or the profile's name has characters that a certificate may not carry", nil)
	}
	if req.TTL < least || req.TTL > most {
		return nil, fmt.Errorf("sign certificate: lifetime %s is outside %s to %s", req.TTL, least, most)
	}
	return CheckCSR(req.CSR, id)
}

// extensionSafe reports whether s may stand in the private extension: it holds neither the separator nor any character
// that the authority's template could read as syntax.
func extensionSafe(s string) bool { return extensionText.MatchString(s) }

var extensionText = regexp.MustCompile(`^[A-Za-z0-9._-]{0,128}$`)

// checkIssued verifies a signed chain as if the authority were not ours: a template that was changed outside this
// package must not yield a certificate.
func checkIssued(chain []*x509.Certificate, csr *x509.CertificateRequest, id pki.ID, latest time.Time) (Issued, error) {
	if len(chain) == 0 {
		return Issued{}, unavailable(errors.New("authority answered no certificate"))
	}
	leaf := chain[0]
	peer, err := pki.PeerFromChain([][]*x509.Certificate{chain}, id.TrustDomain, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return Issued{}, unavailable(fmt.Errorf("authority signed something else: %w", err))
	}
	wantKey, err := pki.PublicKeyFingerprint(csr.PublicKey)
	if err != nil {
		return Issued{}, err
	}
	gotKey, err := pki.PublicKeyFingerprint(leaf.PublicKey)
	if err != nil {
		return Issued{}, err
	}
	switch {
	case peer.ID != id:
		return Issued{}, unavailable(fmt.Errorf("authority signed for %s instead of %s", peer.ID, id))
	case gotKey != wantKey:
		return Issued{}, unavailable(errors.New("authority signed another key"))
	case len(leaf.ExtKeyUsage) != 1 || len(leaf.UnknownExtKeyUsage) > 0:
		return Issued{}, unavailable(errors.New("authority signed for more than client authentication"))
	case leaf.NotAfter.After(latest.Add(time.Second)):
		return Issued{}, unavailable(errors.New("authority signed for longer than asked"))
	}
	out := Issued{Serial: peer.Serial, NotBefore: leaf.NotBefore, NotAfter: leaf.NotAfter}
	for _, cert := range chain {
		out.Chain = append(out.Chain, cert.Raw)
	}
	return out, nil
}

func unavailable(cause error) error {
	return fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE, "the certificate authority did not sign",
		fault.Cause(cause))
}

// certificates unwraps the certificates of the authority's API.
func certificates(in []api.Certificate) []*x509.Certificate {
	out := make([]*x509.Certificate, 0, len(in))
	for _, cert := range in {
		out = append(out, cert.Certificate)
	}
	return out
}
