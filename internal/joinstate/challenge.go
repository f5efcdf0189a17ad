package joinstate

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrChallenge is returned if a challenge is not signed by the key.
var ErrChallenge = errors.New("challenge is not signed by this key")

const challengeDomain = "gpuaas/challenge/v1"

// challengeDigest returns a digest of the nonce and the node: an answer is valid for no other challenge and no other
// identity.
func challengeDigest(nonce []byte, nodeID string) []byte {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(challengeDomain), nonce, []byte(nodeID)} {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	return h.Sum(nil)
}

// SignChallenge returns the signature of a challenge with the key of the node's certificate.
func SignChallenge(key crypto.Signer, nonce []byte, nodeID string) ([]byte, error) {
	digest := challengeDigest(nonce, nodeID)
	if k, ok := key.(ed25519.PrivateKey); ok {
		return ed25519.Sign(k, digest), nil
	}
	sig, err := key.Sign(rand.Reader, digest, crypto.SHA256)
	if err != nil {
		return nil, fmt.Errorf("sign challenge: %w", err)
	}
	return sig, nil
}

// VerifyChallenge checks an answer against the public key of the certificate with which the peer authenticated the
// connection. The error wraps ErrChallenge.
func VerifyChallenge(pub crypto.PublicKey, nonce []byte, nodeID string, sig []byte) error {
	digest := challengeDigest(nonce, nodeID)
	var ok bool
	switch k := pub.(type) {
	case *ecdsa.PublicKey:
		ok = ecdsa.VerifyASN1(k, digest, sig)
	case ed25519.PublicKey:
		ok = ed25519.Verify(k, digest, sig)
	case *rsa.PublicKey:
		ok = rsa.VerifyPKCS1v15(k, crypto.SHA256, digest, sig) == nil
	default:
		return fmt.Errorf("%w: key of type %T", ErrChallenge, pub)
	}
	if !ok {
		return ErrChallenge
	}
	return nil
}
