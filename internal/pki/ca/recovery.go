package ca

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.step.sm/crypto/jose"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// RecoveryPrefix begins the text of every recovery token.
	RecoveryPrefix = "grt_"
	// recoveryType is the type in the header of a recovery token, which no other token of the provisioner's key has.
	recoveryType = "grt+jwt"
	// maxRecoverySize bounds the text of a recovery token.
	maxRecoverySize = 2048
	// signatureSize is the length of a signature of either algorithm.
	signatureSize = 64
)

// RecoveryClaims are the contents of a recovery token.
type RecoveryClaims struct {
	TokenID        string
	NodeID         string
	NodeInstanceID string
	Profile        string
	KeySHA256      []byte // of the node's recovery key (SubjectPublicKeyInfo)
	IssuedAt       time.Time
	Era            int64
}

// RecoveryTokens signs recovery tokens with one key, and verifies them. Their audience is recovery's own:
// the authority accepts none of them. A token has no end in it, since its age is judged by rows. Safe for concurrent
// use.
type RecoveryTokens struct {
	public   crypto.PublicKey // *ecdsa.PublicKey of P-256, or ed25519.PublicKey
	keyID    string
	signer   jose.Signer // nil: it only verifies
	audience string
}

// recoveryHeader is the header of a token.
type recoveryHeader struct {
	Algorithm string `json:"alg"`
	KeyID     string `json:"kid"`
	Type      string `json:"typ"`
}

// recoveryPayload is the payload of a token.
type recoveryPayload struct {
	Audience       string `json:"aud"`
	TokenID        string `json:"jti"`
	Subject        string `json:"sub"`
	NodeInstanceID string `json:"node_instance_id"`
	Profile        string `json:"profile"`
	Key            string `json:"key_sha256"`
	IssuedAt       int64  `json:"iat"`
	Era            int64  `json:"era"`
}

// UnknownKeyError is returned for a token that names another key than this process has. Its fields are not verified.
type UnknownKeyError struct{ KeyID, TokenID string }

// Error returns the message, without the token.
func (e *UnknownKeyError) Error() string { return "the recovery token is signed by another key" }

// NewRecoveryTokens returns the tokens of a key: the provisioner's, of P-256, or one of the mesh's set, of Ed25519.
func NewRecoveryTokens(key crypto.Signer, trustDomain string) (*RecoveryTokens, error) {
	t := &RecoveryTokens{public: key.Public(), audience: "gpuaas:recovery:" + trustDomain}
	switch private := key.(type) {
	case ed25519.PrivateKey:
		public, _ := private.Public().(ed25519.PublicKey)
		t.keyID = pki.KeyID(public)
	case *ecdsa.PrivateKey:
		if private.Curve != elliptic.P256() {
			return nil, errors.New("make recovery tokens: the provisioner's key is none of P-256")
		}
		var err error
		if t.keyID, err = keyID(private); err != nil {
			return nil, err
		}
	default:
		return nil, errors.New("make recovery tokens: the key is neither of P-256 nor of Ed25519")
	}
	var err error
	t.signer, err = jose.NewSigner(jose.SigningKey{Algorithm: jose.SignatureAlgorithm(t.algorithm()), Key: key},
		new(jose.SignerOptions).WithType(recoveryType).WithHeader("kid", t.keyID))
	if err != nil {
		return nil, fmt.Errorf("make recovery token signer: %w", err)
	}
	return t, nil
}

// algorithm returns the name of the key's algorithm in the header of a token.
func (t *RecoveryTokens) algorithm() string {
	if _, ok := t.public.(ed25519.PublicKey); ok {
		return string(jose.EdDSA)
	}
	return string(jose.ES256)
}

// verifies reports whether the key has made a signature of signatureSize bytes.
func (t *RecoveryTokens) verifies(signed string, signature []byte) bool {
	switch public := t.public.(type) {
	case ed25519.PublicKey:
		return ed25519.Verify(public, []byte(signed), signature)
	case *ecdsa.PublicKey:
		digest := sha256.Sum256([]byte(signed))
		r, s := new(big.Int).SetBytes(signature[:signatureSize/2]), new(big.Int).SetBytes(signature[signatureSize/2:])
		return ecdsa.Verify(public, digest[:], r, s)
	}
	return false
}

// KeyID returns the name of the key that signs.
func (t *RecoveryTokens) KeyID() string { return t.keyID }

// Sign returns the text of a token. Two texts of the same claims differ in their signature, and both are good.
func (t *RecoveryTokens) Sign(c RecoveryClaims) (string, error) {
	if t.signer == nil {
		return "", errOnlyVerifies
	}
	text, err := jose.Signed(t.signer).Claims(recoveryPayload{
		Audience: t.audience, TokenID: c.TokenID, Subject: c.NodeID, NodeInstanceID: c.NodeInstanceID, Profile: c.Profile,
		Key: base64.RawURLEncoding.EncodeToString(c.KeySHA256), IssuedAt: c.IssuedAt.Unix(), Era: c.Era,
	}).CompactSerialize()
	if err != nil {
		return "", fmt.Errorf("sign recovery token: %w", err)
	}
	return RecoveryPrefix + text, nil
}

// Verify returns the contents of a token that this key has signed for this audience. A token that names another key is
// *UnknownKeyError; every other refusal is fault token_invalid. No error contains the text.
func (t *RecoveryTokens) Verify(text string) (RecoveryClaims, error) {
	signed, signature, payload, header, err := splitRecovery(text)
	if err != nil {
		return RecoveryClaims{}, err
	}
	if header.KeyID != t.keyID {
		return RecoveryClaims{}, &UnknownKeyError{KeyID: header.KeyID, TokenID: payload.TokenID}
	}
	if header.Algorithm != t.algorithm() {
		return RecoveryClaims{}, badToken("its algorithm is not that of its key")
	}
	if !t.verifies(signed, signature) {
		return RecoveryClaims{}, badToken("its signature is wrong")
	}
	if payload.Audience != t.audience {
		return RecoveryClaims{}, badToken("its audience is another")
	}
	key, err := base64.RawURLEncoding.Strict().DecodeString(payload.Key)
	if err != nil || len(key) != sha256.Size || payload.IssuedAt <= 0 || payload.Era < 0 || payload.Profile == "" ||
		!extensionSafe(payload.Profile) {
		return RecoveryClaims{}, badToken("its claims are malformed")
	}
	for _, id := range []string{payload.Subject, payload.NodeInstanceID} {
		if !isID(id) {
			return RecoveryClaims{}, badToken("its claims are malformed")
		}
	}
	return RecoveryClaims{
		TokenID: payload.TokenID, NodeID: payload.Subject, NodeInstanceID: payload.NodeInstanceID,
		Profile: payload.Profile, KeySHA256: key, IssuedAt: time.Unix(payload.IssuedAt, 0), Era: payload.Era,
	}, nil
}

// CheckRecoveryForm returns fault token_invalid unless a text has the form of a recovery token.
func CheckRecoveryForm(text string) error {
	_, _, _, _, err := splitRecovery(text)
	return err
}

// splitRecovery returns the parts of a token without verifying them: what is signed, the signature, the payload and the
// header.
func splitRecovery(text string) (string, []byte, recoveryPayload, recoveryHeader, error) {
	var header recoveryHeader
	var payload recoveryPayload
	fail := func(why string) (string, []byte, recoveryPayload, recoveryHeader, error) {
		return "", nil, recoveryPayload{}, recoveryHeader{}, badToken(why)
	}
	rest, ok := strings.CutPrefix(text, RecoveryPrefix)
	if !ok || len(text) > maxRecoverySize {
		return fail("its form is wrong")
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 3 {
		return fail("its form is wrong")
	}
	if !readPart(parts[0], &header) || header.Type != recoveryType ||
		header.Algorithm != string(jose.ES256) && header.Algorithm != string(jose.EdDSA) {
		return fail("its header is malformed")
	}
	if !readPart(parts[1], &payload) || !isID(payload.TokenID) {
		return fail("its claims are malformed")
	}
	signature, err := base64.RawURLEncoding.Strict().DecodeString(parts[2])
	if err != nil || len(signature) != signatureSize {
		return fail("its signature is malformed")
	}
	return parts[0] + "." + parts[1], signature, payload, header, nil
}

// readPart reads one object of known fields, and reports whether that is all there is.
func readPart(text string, into any) bool {
	raw, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil {
		return false
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return false
	}
	_, err = decoder.Token()
	return errors.Is(err, io.EOF)
}

// isID reports whether a text is an id as we write them.
func isID(text string) bool {
	parsed, err := uuid.Parse(text)
	return err == nil && parsed.String() == text
}

func badToken(why string) error {
	return fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "", fault.Cause(errors.New(why)))
}
