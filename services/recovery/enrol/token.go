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
)

const (
	prefixBootstrap = "gbt_"
	prefixLaunch    = "gls_"
	secretSize      = 32
)

// Presented is a token as a caller presented it: its id for the look-up, and the hash to compare.
type Presented struct {
	Kind Kind
	// ID is of a bootstrap token, or of the instance for a launch secret. A recovery token has it in what is signed.
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
	rest, ok := strings.CutPrefix(text, prefixBootstrap)
	p.Kind = KindBootstrap
	if !ok {
		if rest, ok = strings.CutPrefix(text, prefixLaunch); !ok {
			return Presented{}, invalid("it has no prefix of ours")
		}
		p.Kind = KindLaunch
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

// newBootstrapToken returns the text of a new token, which is shown once, and its hash.
func newBootstrapToken(tokenID string) (string, []byte, error) {
	parsed, err := uuid.Parse(tokenID)
	if err != nil {
		return "", nil, errors.New("make bootstrap token: its id is no UUID")
	}
	secret := make([]byte, secretSize)
	if _, err := rand.Read(secret); err != nil {
		return "", nil, err
	}
	text := prefixBootstrap + hex.EncodeToString(parsed[:]) + "_" + base64.RawURLEncoding.EncodeToString(secret)
	sum := sha256.Sum256([]byte(text))
	return text, sum[:], nil
}

func invalid(why string) error {
	return fault.New(commonv1.Reason_REASON_TOKEN_INVALID, "", fault.Cause(errors.New(why)))
}
