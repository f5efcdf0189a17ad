package ca

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"time"

	"go.step.sm/crypto/jose"

	"github.com/gpuaas/mesh/internal/pki"
)

// tokenLife is short: a token is used immediately after it is minted.
const tokenLife = 2 * time.Minute

// DefaultProvisioner is the name of the authority's JWK provisioner.
const DefaultProvisioner = "node-enroll"

// minter makes the authority's one-time tokens.
type minter struct {
	signer      jose.Signer
	provisioner string
	audience    string
}

// tokenClaims are the claims that the authority verifies and that its template puts into the private extension.
type tokenClaims struct {
	jose.Claims
	SANs           []string          `json:"sans"`
	Confirmation   map[string]string `json:"cnf"`
	NodeID         string            `json:"node_id"`
	NodeInstanceID string            `json:"node_instance_id"`
	Profile        string            `json:"env_profile"`
}

func newMinter(key *ecdsa.PrivateKey, provisioner, audience string) (*minter, error) {
	kid, err := keyID(key)
	if err != nil {
		return nil, err
	}
	opts := new(jose.SignerOptions).WithType("JWT").WithHeader("kid", kid)
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: key}, opts)
	if err != nil {
		return nil, fmt.Errorf("make token signer: %w", err)
	}
	return &minter{signer: signer, provisioner: provisioner, audience: audience}, nil
}

// mint makes a token that is good for this request once, and for no other request. Its id is random: an attacker who
// guessed the id of a token could burn it, because the authority marks an id as used before it verifies the signature.
func (m *minter) mint(csr *x509.CertificateRequest, id pki.ID, req SignRequest, now time.Time) (string, error) {
	digest := sha256.Sum256(csr.Raw)
	token, err := jose.Signed(m.signer).Claims(tokenClaims{
		Claims: jose.Claims{
			ID: rand.Text(), Issuer: m.provisioner, Subject: req.NodeID, Audience: jose.Audience{m.audience},
			IssuedAt: jose.NewNumericDate(now), NotBefore: jose.NewNumericDate(now),
			Expiry: jose.NewNumericDate(now.Add(tokenLife)),
		},
		SANs:         []string{id.String()},
		Confirmation: map[string]string{"x5rt#S256": base64.RawURLEncoding.EncodeToString(digest[:])},
		NodeID:       req.NodeID, NodeInstanceID: req.NodeInstanceID, Profile: req.Profile,
	}).CompactSerialize()
	if err != nil {
		return "", fmt.Errorf("sign one-time token: %w", err)
	}
	return token, nil
}

func publicJWK(key *ecdsa.PrivateKey) (*jose.JSONWebKey, error) {
	kid, err := keyID(key)
	if err != nil {
		return nil, err
	}
	return &jose.JSONWebKey{Key: key.Public(), KeyID: kid, Algorithm: jose.ES256, Use: "sig"}, nil
}

func keyID(key *ecdsa.PrivateKey) (string, error) {
	kid, err := jose.Thumbprint(&jose.JSONWebKey{Key: key.Public()})
	if err != nil {
		return "", fmt.Errorf("name provisioner key: %w", err)
	}
	return kid, nil
}
