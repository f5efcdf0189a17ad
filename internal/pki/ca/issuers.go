package ca

import (
	"context"
	"crypto"
	"crypto/x509"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/smallstep/certificates/authority"
	"github.com/smallstep/certificates/db"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

// Issuer is a certificate that the authority signs with, or could, and the root that it leads to.
type Issuer struct{ Certificate, Root *x509.Certificate }

// Rotating is an authority whose issuer can be exchanged while it signs. Replicas that share its directory share its
// issuers.
type Rotating interface {
	Signer
	// Prepare makes the issuer of a rotation, under a root of its own if withRoot is true. The id is a UUID; the same id
	// gets the same issuer.
	Prepare(id string, withRoot bool) (Issuer, error)
	// Find returns the issuer of a fingerprint; fault certificate_authority_unavailable if the directory has none.
	Find(fingerprint string) (Issuer, error)
	// Use has the authority sign with the issuer of a fingerprint; the empty one is the issuer that the authority was made
	// with. If the directory does not have the issuer, nothing is signed until a later call succeeds.
	Use(fingerprint string) error
	// SignWith signs with the issuer of a fingerprint, which need not be in use. The chain has no cross certificate, so it
	// is accepted only by a peer that trusts the issuer's own root.
	SignWith(ctx context.Context, fingerprint string, req SignRequest) (Issued, error)
}

// Files of the issuers and roots of rotations. An issuer's file may have a cross certificate behind its own.
const (
	laterIssuers = "issuer-*.pem"
	laterRoots   = "root-*.pem"
)

// signing is one issuer with what it needs to sign.
type signing struct {
	authority *authority.Authority
	issuer    *authorityPair
	root      *authorityPair
	crosses   []*x509.Certificate
}

// use is what the authority signs with; err is set instead if it may sign with nothing.
type use struct {
	*signing

	fingerprint string // as it was asked for
	err         error
}

// Use implements Rotating.
func (e *Embedded) Use(fingerprint string) error {
	if now := e.inUse.Load(); now != nil && now.err == nil && now.fingerprint == fingerprint {
		return nil
	}
	found, err := e.open(fingerprint)
	e.inUse.Store(&use{signing: found, fingerprint: fingerprint, err: err})
	return err
}

// signs returns what the authority signs with.
func (e *Embedded) signs() (*signing, error) {
	now := e.inUse.Load()
	if now == nil {
		return nil, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE,
			"the authority does not know yet which issuer signs")
	}
	return now.signing, now.err
}

// shows returns what the authority signs with, or the issuer that it was made with as long as that is not decided.
func (e *Embedded) shows() (*signing, error) {
	if e.inUse.Load() == nil {
		return e.open("")
	}
	return e.signs()
}

// Find implements Rotating.
func (e *Embedded) Find(fingerprint string) (Issuer, error) {
	found, err := e.open(fingerprint)
	if err != nil {
		return Issuer{}, err
	}
	return Issuer{Certificate: found.issuer.cert, Root: found.root.cert}, nil
}

// open returns the issuer of a fingerprint, ready to sign.
func (e *Embedded) open(fingerprint string) (*signing, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if found := e.issuers[fingerprint]; found != nil {
		return found, nil
	}
	found, err := e.read(fingerprint)
	if err != nil {
		return nil, err
	}
	if found.authority, err = e.start(found.root, found.issuer, e.authority.GetDatabase()); err != nil {
		return nil, err
	}
	e.issuers[fingerprint] = found
	return found, nil
}

// read looks for the issuer of a fingerprint in the directory.
func (e *Embedded) read(fingerprint string) (*signing, error) {
	paths, err := filepath.Glob(filepath.Join(e.cfg.Dir, laterIssuers))
	if err != nil {
		return nil, fmt.Errorf("list issuers: %w", err)
	}
	for _, path := range append([]string{filepath.Join(e.cfg.Dir, intermediateFile)}, paths...) {
		pair, behind, err := readPair(path)
		if err != nil || pki.Fingerprint(pair.cert) != fingerprint {
			continue // a file that another process is about to write, or another issuer's
		}
		root, err := e.rootOf(pair.cert)
		if err != nil {
			return nil, err
		}
		return &signing{issuer: pair, root: root, crosses: behind}, nil
	}
	return nil, fault.New(commonv1.Reason_REASON_CERTIFICATE_AUTHORITY_UNAVAILABLE,
		"this replica does not have the issuer that signs",
		fault.Cause(fmt.Errorf("no file in %s has the issuer %s", e.cfg.Dir, fingerprint)),
		fault.Remedy("copy the files issuer-*.pem and root-*.pem from the ca_dir of a replica that signs (`gpuaas ca "+
			"status` names the issuer)"))
}

// roots returns the roots of the directory.
func (e *Embedded) roots() ([]*authorityPair, error) {
	paths, err := filepath.Glob(filepath.Join(e.cfg.Dir, laterRoots))
	if err != nil {
		return nil, fmt.Errorf("list roots: %w", err)
	}
	out := []*authorityPair{e.root}
	for _, path := range paths {
		pair, _, err := readPair(path)
		if err == nil { // a file that another process is about to write is read by a later call
			out = append(out, pair)
		}
	}
	return out, nil
}

// rootOf returns the root that has signed an issuer.
func (e *Embedded) rootOf(issuer *x509.Certificate) (*authorityPair, error) {
	roots, err := e.roots()
	if err != nil {
		return nil, err
	}
	for _, root := range roots {
		if issuer.CheckSignatureFrom(root.cert) == nil {
			return root, nil
		}
	}
	return nil, unavailable(fmt.Errorf("the root of issuer %s is not in %s", pki.Fingerprint(issuer), e.cfg.Dir))
}

// Prepare implements Rotating.
func (e *Embedded) Prepare(id string, withRoot bool) (Issuer, error) {
	if parsed, err := uuid.Parse(id); err != nil || parsed.String() != id {
		return Issuer{}, fmt.Errorf("make the next issuer: %q is no id of a rotation", id)
	}
	before, err := e.signs()
	if err != nil && !withRoot {
		return Issuer{}, err // its root is not known
	}
	path := filepath.Join(e.cfg.Dir, "issuer-"+id+".pem")
	err = pki.WithLock(filepath.Join(e.cfg.Dir, lockFile), func() error {
		if found, err := pki.Exists(path); err != nil || found {
			return err
		}
		name := e.cfg.TrustDomain + " node"
		if !withRoot {
			return createPair(path, name+" intermediate "+suffix(id), intermediateLife, before.root)
		}
		root, err := loadOrCreatePair(filepath.Join(e.cfg.Dir, "root-"+id+".pem"), name+" root "+suffix(id), rootLife, nil)
		if err != nil {
			return err
		}
		var behind [][]byte
		if before != nil {
			// A peer that trusts only the root before comes to the next one by it.
			cross, err := crossSign(root.cert, before.root)
			if err != nil {
				return err
			}
			behind = append(behind, cross.Raw)
		}
		return createPair(path, name+" intermediate "+suffix(id), intermediateLife, root, behind...)
	})
	if err != nil {
		return Issuer{}, fmt.Errorf("make the next issuer: %w", err)
	}
	pair, _, err := readPair(path)
	if err != nil {
		return Issuer{}, fmt.Errorf("make the next issuer: %w", err)
	}
	root, err := e.rootOf(pair.cert)
	if err != nil {
		return Issuer{}, fmt.Errorf("make the next issuer: %w", err)
	}
	return Issuer{Certificate: pair.cert, Root: root.cert}, nil
}

// suffix distinguishes the names of what rotations make.
func suffix(id string) string { return id[len(id)-12:] }

// SignWith implements Rotating.
func (e *Embedded) SignWith(ctx context.Context, fingerprint string, req SignRequest) (Issued, error) {
	with, err := e.open(fingerprint)
	if err != nil {
		return Issued{}, err
	}
	return e.signBy(ctx, with, req)
}

// earlier returns the earlier end: an issuer must not outlive its root.
func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// readPair reads an authority's certificate with its key, and the certificates behind it.
func readPair(path string) (*authorityPair, []*x509.Certificate, error) {
	data, err := pki.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	key, err := pki.DecodeKey(data)
	if err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", path, err)
	}
	certs, err := pki.DecodeCertificates(data)
	if err != nil {
		return nil, nil, fmt.Errorf("read %s: %w", path, err)
	}
	if !certs[0].IsCA {
		return nil, nil, fmt.Errorf("read %s: not an authority's certificate", path)
	}
	public, ok := certs[0].PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(key.Public()) {
		return nil, nil, fmt.Errorf("read %s: its key is not that of its certificate", path)
	}
	return &authorityPair{cert: certs[0], key: key}, certs[1:], nil
}

// start returns smallstep's authority for a pair; issued certificates and used tokens are kept in the given database,
// nil for one of its own.
func (e *Embedded) start(root, issuer *authorityPair, kept db.AuthDB) (*authority.Authority, error) {
	options := []authority.Option{
		authority.WithConfig(e.config), authority.WithX509RootCerts(root.cert),
		authority.WithX509Signer(issuer.cert, issuer.key), authority.WithQuietInit(),
	}
	if kept != nil {
		options = append(options, authority.WithDatabase(kept))
	}
	out, err := authority.NewEmbedded(options...)
	if err != nil {
		return nil, fmt.Errorf("start authority: %w", err)
	}
	return out, nil
}

// first returns roots with the given one before the others.
func first(root *x509.Certificate, all []*authorityPair) []*x509.Certificate {
	out := []*x509.Certificate{root}
	for _, pair := range all {
		if !slices.ContainsFunc(out, pair.cert.Equal) {
			out = append(out, pair.cert)
		}
	}
	return out
}
