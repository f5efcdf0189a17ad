package enrol

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strings"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pki/ca"
)

// Kind is what a token is for.
type Kind string

// The kinds, as they are stored.
const (
	KindBootstrap Kind = "bootstrap" // an operator's, for one node
	KindLaunch    Kind = "launch"    // a launched instance's
	KindRecovery  Kind = "recovery"  // a node's own, signed, with which it enrols again
	KindBundle    Kind = "bundle"    // an operator's, for a node that exists
)

const (
	prefixBootstrap = "gbt_"
	prefixLaunch    = "gls_"
	prefixBundle    = "gnb_"
	secretSize      = 32
)

// prefixes are what the texts of tokens with a secret begin with.
var prefixes = map[Kind]string{
	KindBootstrap: prefixBootstrap, KindLaunch: prefixLaunch, KindBundle: prefixBundle,
}

// Presented is a token as a caller presented it: its id for the look-up, and the hash to compare.
type Presented struct {
	Kind Kind
	// ID is of an operator's token, or of the instance for a launch secret. A recovery token has it in what is signed.
	ID   string
	Hash []byte // SHA-256 of the whole text
}

// ParseToken parses the text of a token. It returns fault token_invalid if the form is wrong. No error contains the
// text.
func ParseToken(text string) (Presented, error) {
	var p Presented
	if strings.HasPrefix(text, ca.RecoveryPrefix) {
		if err := ca.CheckRecoveryForm(text); err != nil {
			return Presented{}, err
		}
		sum := sha256.Sum256([]byte(text))
		return Presented{Kind: KindRecovery, Hash: sum[:]}, nil
	}
	rest := ""
	for kind, prefix := range prefixes {
		if after, ok := strings.CutPrefix(text, prefix); ok {
			p.Kind, rest = kind, after
		}
	}
	if p.Kind == "" {
		return Presented{}, invalid("it has no prefix of ours")
	}
	id, secret, ok := strings.Cut(rest, "_")
	if !ok || len(id) != 32 || strings.ToLower(id) != id {
		return Presented{}, invalid("its id is malformed")
	}
	parsed, err := uuid.Parse(id)
	if err != nil {
		return Presented{}, invalid("its id is malformed")
	}
	decoded, err := base64.RawURLEncoding.Strict().DecodeString(secret)
	if err != nil || len(decoded) != secretSize {
		return Presented{}, invalid("its secret is malformed")
	}
	sum := sha256.Sum256([]byte(text))
	p.ID, p.Hash = parsed.String(), sum[:]
	return p, nil
}

// newOperatorToken returns the text of a new token, which is shown once, and its hash.
func newOperatorToken(kind Kind, tokenID string) (string, []byte, error) {
	parsed, err := uuid.Parse(tokenID)
	if err != nil {
		return "", nil, errors.New("make token: its id is no UUID")
	}
	secret := make([]byte, secretSize)
	if _, err := rand.Read(secret); err != nil {
		return "", nil, err
	}
	text := prefixes[kind] + hex.EncodeToString(parsed[:]) + "_" + base64.RawURLEncoding.EncodeToString(secret)
	sum := sha256.Sum256([]byte(text))
	return text, sum[:], nil
}

func invalid(why string) error {
	return fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "", fault.Cause(errors.New(why)))
}
