package people

import (
	"encoding/base64"
	"encoding/hex"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

const (
	tokenPrefix = "gps_"
	secretSize  = 32
	// sessionMax is the longest life of a session.
	sessionMax = 30 * 24 * time.Hour
)

// sessionID returns the session id in a token. No error contains the token.
func sessionID(token string) (string, error) {
	rest, ok := strings.CutPrefix(token, tokenPrefix)
	raw, secret, cut := strings.Cut(rest, "_")
	if !ok || !cut || len(raw) != 32 || strings.ToLower(raw) != raw {
		return "", refused("the token is malformed")
	}
	decoded, err := base64.RawURLEncoding.Strict().DecodeString(secret)
	if err != nil || len(decoded) != secretSize {
		return "", refused("the token's secret is malformed")
	}
	if _, err := hex.DecodeString(raw); err != nil {
		return "", refused("the token's id is malformed")
	}
	parsed, err := uuid.Parse(raw)
	if err != nil {
		return "", refused("the token's id is malformed")
	}
	return parsed.String(), nil
}

// newToken is the remedy for a caller without a valid token.
const newToken = "a person with the role security makes a new one with `gpuaas people create NAME --role R`; " +
	"or name another context or token file"

// refused returns the refusal of a caller about whom nothing is known, because the token proves no session. why goes to
// the log only.
func refused(why string) error { return refusedAs("the token is unknown, expired or ended", why) }

func refusedAs(public, why string) error { return refusedFor(public, why, newToken) }

func refusedFor(public, why, remedy string) error {
	return fault.New(commonv1.Reason_REASON_UNAUTHENTICATED, public, fault.Cause(errors.New(why)), fault.Remedy(remedy))
}
