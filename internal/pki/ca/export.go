package ca

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/pki"
)

// ExportConfig says which authority is exported, and how the step-ca process is to run.
type ExportConfig struct {
	Dir     string   // of the embedded authority
	Issuer  string   // fingerprint of the issuer that signs; needed where a rotation has made others
	Out     string   // the directory that is made
	Address string   // host:port at which the process listens
	Names   []string // names or addresses by which recovery reaches the process; at least one
	// DatabaseURL is the Postgres database of the process; empty: it forgets used tokens when it ends.
	DatabaseURL string
}

// Exported has the files that Export has made, and the one that recovery keeps.
type Exported struct {
	Config      string // of the step-ca process, ca.json
	Root        string // certificate of the root, which verifies the process and its certificates
	Provisioner string // key of the provisioner: recovery's, not the process's
}

// Files of an export, by the names that step-ca gives them.
const (
	exportConfig = "ca.json"
	exportRoot   = "root_ca.crt"
	exportIssuer = "intermediate_ca.crt"
	exportKey    = "intermediate_ca_key"
)

// ErrManyIssuers means that the directory has several issuers, and ExportConfig names none.
var ErrManyIssuers = errors.New("a rotation has made other issuers; name the one that signs by its fingerprint, as " +
	"`gpuaas ca status` shows it")

// Export writes the configuration and the keys with which a step-ca process signs as the embedded authority of a
// directory does: with the same issuer, on the same provisioner's tokens, by the same template and claims. The embedded
// authority stays as it is. Neither the root's key nor the provisioner's is exported. It fails if Out exists.
func Export(cfg ExportConfig) (Exported, error) {
	out, err := export(cfg)
	if err != nil {
		return Exported{}, fmt.Errorf("export authority %s: %w", cfg.Dir, err)
	}
	return out, nil
}

func export(cfg ExportConfig) (Exported, error) {
	if _, _, err := net.SplitHostPort(cfg.Address); err != nil {
		return Exported{}, fmt.Errorf("address of the process: %w", err)
	}
	if len(cfg.Names) == 0 {
		return Exported{}, errors.New("no name by which the process is reached")
	}
	e := &Embedded{cfg: config.Or(Config{Dir: cfg.Dir, TrustDomain: "export"}, defaults)}
	issuer, err := e.exported(cfg.Issuer)
	if err != nil {
		return Exported{}, err
	}
	out := Exported{
		Config: filepath.Join(cfg.Out, exportConfig), Root: filepath.Join(cfg.Out, exportRoot),
		Provisioner: filepath.Join(cfg.Dir, provisionerFile),
	}
	jwk, err := publicJWK(e.provisionerKey)
	if err != nil {
		return Exported{}, err
	}
	e.cfg.DatabaseURL = cfg.DatabaseURL
	settings := authorityConfig(e.cfg, cfg.Names, jwk)
	settings.Address = cfg.Address
	settings.Root, settings.IntermediateCert = []string{out.Root}, filepath.Join(cfg.Out, exportIssuer)
	settings.IntermediateKey = filepath.Join(cfg.Out, exportKey)
	text, err := json.MarshalIndent(settings, "", "  ") //nolint:gosec // no password is set
	if err != nil {
		return Exported{}, fmt.Errorf("write its configuration: %w", err)
	}
	key, err := pki.EncodeKey(issuer.issuer.key)
	if err != nil {
		return Exported{}, err
	}
	if err := os.Mkdir(cfg.Out, 0o700); err != nil {
		return Exported{}, fmt.Errorf("make its directory: %w", err)
	}
	err = errors.Join(
		pki.WriteFile(out.Root, pki.EncodeCertificates([]*x509.Certificate{issuer.root.cert})),
		pki.WriteFile(settings.IntermediateCert, pki.EncodeCertificates([]*x509.Certificate{issuer.issuer.cert})),
		pki.WriteFile(settings.IntermediateKey, key),
		pki.WriteFile(out.Config, text))
	if err != nil {
		return Exported{}, errors.Join(err, os.RemoveAll(cfg.Out))
	}
	return out, nil
}

// exported reads the authority of the directory, which must be complete, and returns the issuer to export.
func (e *Embedded) exported(fingerprint string) (*signing, error) {
	for _, name := range []string{rootFile, intermediateFile, provisionerFile} {
		if found, err := pki.Exists(filepath.Join(e.cfg.Dir, name)); err != nil || !found {
			return nil, errors.Join(err, fmt.Errorf("%s is not there", name))
		}
	}
	later, err := filepath.Glob(filepath.Join(e.cfg.Dir, laterIssuers))
	if err != nil {
		return nil, fmt.Errorf("list issuers: %w", err)
	}
	if fingerprint == "" && len(later) > 0 {
		return nil, ErrManyIssuers
	}
	if err := pki.WithLock(filepath.Join(e.cfg.Dir, lockFile), e.load); err != nil {
		return nil, err
	}
	if fingerprint == "" {
		fingerprint = pki.Fingerprint(e.intermediate.cert)
	}
	return e.read(fingerprint)
}
