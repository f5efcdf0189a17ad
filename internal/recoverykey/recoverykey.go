// Package recoverykey proves possession of the recovery key of a node: the key to which its recovery tokens are bound,
// and which is none of its certificates'.
//
// The proof covers the token and the certificate request, so that it is of use for no other token and no other request.
// It never decides whether a token is good.
package recoverykey

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrProof is returned if a proof is not of this key, or of another token or request.
var ErrProof = errors.New("recovery proof is not of this key")

// What a proof is for is the first part of what it signs.
const (
	domain        = "gpuaas/recovery/v1"
	domainMissing = "gpuaas/recovery-token-missing/v1"
)

// digest returns what a proof signs: each part after its length, so that no two lists of parts are alike.
func digest(parts ...[]byte) []byte {
	h := sha256.New()
	for _, part := range parts {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	return h.Sum(nil)
}

// Sign returns the proof for a token and a certificate request (DER). The key is of ECDSA or Ed25519.
func Sign(key crypto.Signer, token string, csr []byte) ([]byte, error) {
	return sign(key, digest([]byte(domain), []byte(token), csr))
}

// SignMissing returns the proof that the holder of a node's certificate, of which the key is, says that it has no
// recovery token to send.
func SignMissing(key crypto.Signer, nodeID, serial string) ([]byte, error) {
	return sign(key, digest([]byte(domainMissing), []byte(nodeID), []byte(serial)))
}

func sign(key crypto.Signer, digest []byte) ([]byte, error) {
	if k, ok := key.(ed25519.PrivateKey); ok {
		return ed25519.Sign(k, digest), nil
	}
	proof, err := key.Sign(rand.Reader, digest, crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign recovery proof: %w", err)
	}
	return proof, nil
}

// Verify checks a proof against a public key (DER, SubjectPublicKeyInfo). The error wraps ErrProof.
func Verify(public []byte, token string, csr, proof []byte) error {
	return verify(public, digest([]byte(domain), []byte(token), csr), proof)
}

// VerifyMissing checks a proof of SignMissing against the public key of the certificate (DER, SubjectPublicKeyInfo).
// The error wraps ErrProof.
func VerifyMissing(public []byte, nodeID, serial string, proof []byte) error {
	return verify(public, digest([]byte(domainMissing), []byte(nodeID), []byte(serial)), proof)
}

func verify(public, digest, proof []byte) error {
	key, err := Parse(public)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrProof, err)
	}
	ok := false
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		ok = ecdsa.VerifyASN1(k, digest, proof)
	case ed25519.PublicKey:
		ok = ed25519.Verify(k, digest, proof)
	}
	if !ok {
		return ErrProof
	}
	return nil
}

// Parse returns the public key in DER (SubjectPublicKeyInfo) if it is of a kind that Verify knows.
func Parse(public []byte) (crypto.PublicKey, error) {
	key, err := x509.ParsePKIXPublicKey(public)
	if err != nil {
		return nil, fmt.Errorf("parse recovery key: %w", err)
	}
	switch key.(type) {
	case *ecdsa.PublicKey, ed25519.PublicKey:
		return key, nil
	default:
		return nil, fmt.Errorf("recovery key of type %T", key)
	}
}

// Public returns the public half of a key as DER (SubjectPublicKeyInfo).
func Public(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, fmt.Errorf("encode recovery key: %w", err)
	}
	return der, nil
}
