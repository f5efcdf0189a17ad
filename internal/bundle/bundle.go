package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/pki"
)

// Extension is what the name of an archive's file ends with.
const Extension = ".gpuaas-bundle.tar.gz"

// The files of an archive.
const (
	fileManifest      = "manifest.json"
	fileSignature     = "signature.json"
	FileEnv           = "node-agent.env"
	FileCA            = "ca-bundle.crt"
	FileRecoveryCA    = "recovery-ca-bundle.crt"
	digestPrefix      = "sha256:"
	format            = 1
	signedWithPurpose = "gpuaas node bundle\n" // precedes the manifest in what is signed
)

// contents are the files that a manifest names, in the order of the archive.
var contents = []string{FileEnv, FileCA, FileRecoveryCA}

// Profile names the profile whose endpoints and trust an archive has.
type Profile struct {
	Name        string `json:"name"`
	Fingerprint string `json:"fingerprint"`
	Version     int64  `json:"version"`
}

// Package is how the agent is to be installed, as far as recovery knows it. The agent only logs it.
type Package struct {
	AgentVersion string `json:"agent_version"`
	Unit         string `json:"unit"`
	InstallRoot  string `json:"install_root"`
	Source       string `json:"source"`
}

// File is one file as the manifest describes it.
type File struct {
	Name   string `json:"name"`
	Size   int    `json:"size"`
	SHA256 string `json:"sha256"`
}

// Manifest is the description of an archive that is signed.
type Manifest struct {
	Format         int       `json:"format"`
	NodeID         string    `json:"node_id"`
	NodeInstanceID string    `json:"node_instance_id,omitempty"` // of the node when the archive was made
	NodeName       string    `json:"node_name"`
	TrustDomain    string    `json:"trust_domain"`
	Profile        Profile   `json:"profile"`
	TokenID        string    `json:"token_id"`
	IssuedAt       time.Time `json:"issued_at"`
	ExpiresAt      time.Time `json:"expires_at"` // of the token; recovery decides by its own clock
	Package        Package   `json:"package"`
	Files          []File    `json:"files"`
}

// Files are the contents of an archive.
type Files struct {
	Env        []byte // with the token
	CA         []byte // trust for the node API
	RecoveryCA []byte // trust for the enrolment listener
}

func (f Files) named() map[string][]byte {
	return map[string][]byte{FileEnv: f.Env, FileCA: f.CA, FileRecoveryCA: f.RecoveryCA}
}

// Archive is an archive that is whole.
type Archive struct {
	Manifest Manifest
	Files    Files
	Digest   string // `sha256:` and the hexadecimal digest of the whole archive

	manifest []byte
	signed   signature
}

// signature is the content of signature.json.
type signature struct {
	Certificates [][]byte `json:"certificates"` // DER, the signer's first
	Signature    []byte   `json:"signature"`
}

// DigestOf returns the digest of an archive as it is printed and compared.
func DigestOf(archive []byte) string {
	sum := sha256.Sum256(archive)
	return digestPrefix + hex.EncodeToString(sum[:])
}

// Write returns an archive with the given contents, signed by a service's certificate. It fills in the manifest's
// format and files.
func Write(m Manifest, files Files, by *tls.Certificate) ([]byte, error) {
	m.Format, m.Files = format, nil
	named := files.named()
	for _, name := range contents {
		sum := sha256.Sum256(named[name])
		m.Files = append(m.Files, File{Name: name, Size: len(named[name]), SHA256: hex.EncodeToString(sum[:])})
	}
	manifest, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write bundle: %w", err)
	}
	signed, err := sign(manifest, by)
	if err != nil {
		return nil, fmt.Errorf("sign bundle: %w", err)
	}
	named[fileManifest], named[fileSignature] = manifest, signed
	var out bytes.Buffer
	packed := gzip.NewWriter(&out)
	archive := tar.NewWriter(packed)
	for _, name := range slices.Concat([]string{fileManifest, fileSignature}, contents) {
		err := archive.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(named[name])), Format: tar.FormatUSTAR,
		})
		if err == nil {
			_, err = archive.Write(named[name])
		}
		if err != nil {
			return nil, fmt.Errorf("write bundle: %w", err)
		}
	}
	if err := errors.Join(archive.Close(), packed.Close()); err != nil {
		return nil, fmt.Errorf("write bundle: %w", err)
	}
	return out.Bytes(), nil
}

// message returns what is signed for a manifest.
func message(manifest []byte) []byte { return append([]byte(signedWithPurpose), manifest...) }

func sign(manifest []byte, by *tls.Certificate) ([]byte, error) {
	if by == nil || len(by.Certificate) == 0 {
		return nil, errors.New("no certificate is held")
	}
	key, ok := by.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("the certificate's key cannot sign")
	}
	text := message(manifest)
	var value []byte
	var err error
	switch key.Public().(type) {
	case *ecdsa.PublicKey:
		sum := sha256.Sum256(text)
		value, err = key.Sign(rand.Reader, sum[:], crypto.SHA256)
	case ed25519.PublicKey:
		value, err = key.Sign(rand.Reader, text, crypto.Hash(0))
	default:
		return nil, errors.New("the certificate's key is of a kind that signs no bundle")
	}
	if err != nil {
		return nil, err
	}
	return json.Marshal(signature{Certificates: by.Certificate, Signature: value})
}

// Verify returns nil if the archive was signed by recovery, as the given roots of services verify it now. The error
// says why not; it is no fault, since other roots or the archive's digest may vouch for it.
func (a *Archive) Verify(roots *pki.Bundle, trustDomain string, now time.Time) error {
	chain, err := pki.ParseChain(a.signed.Certificates)
	if err != nil {
		return fmt.Errorf("read signer: %w", err)
	}
	_, err = pki.ClientConfig{
		Roots: roots, Server: pki.ServiceID(trustDomain, "recovery"), Time: func() time.Time { return now },
	}.VerifyServer(tls.ConnectionState{PeerCertificates: chain})
	if err != nil {
		return fmt.Errorf("verify signer: %w", err)
	}
	var algorithm x509.SignatureAlgorithm
	switch chain[0].PublicKey.(type) {
	case *ecdsa.PublicKey:
		algorithm = x509.ECDSAWithSHA256
	case ed25519.PublicKey:
		algorithm = x509.PureEd25519
	default:
		return errors.New("verify signature: the signer's key is of a kind that signs no bundle")
	}
	if err := chain[0].CheckSignature(algorithm, message(a.manifest), a.signed.Signature); err != nil {
		return fmt.Errorf("verify signature: %w", err)
	}
	return nil
}

// CheckDigest returns nil if text is the archive's digest, else fault bundle_invalid.
func (a *Archive) CheckDigest(text string) error {
	text = strings.ToLower(strings.TrimSpace(text))
	if !strings.HasPrefix(text, digestPrefix) {
		text = digestPrefix + text
	}
	if subtle.ConstantTimeCompare([]byte(text), []byte(a.Digest)) != 1 {
		return Invalid("its digest is " + a.Digest + ", not the one that was given")
	}
	return nil
}
